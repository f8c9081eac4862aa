"""Checks between replicas: no replica relies on a failed one, and consumers leave an unusable
producer in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from holdfast.types import Stability
from holdfast.verify.checkers.story import Story
from holdfast.verify.checkers.verdict import Fault, Verdict, judged
from holdfast.verify.history import Made, Reading, Relied

T = TypeVar("T", Reading, Relied)

#: Time within which the wrong one of two diverging replicas is found: replicas compare digests
#: every second, recompute the bucket one after the other, and check ten seconds later whether an
#: input was wrong.
TOLD_APART_US = 15_000_000


def promises(story: Story) -> Verdict:
    """While replicas correct, one of them answers (Borealis section 3.4.3). A replica that relies
    on another one detects the failure of that replica. A promise to wait expires if the awaited
    correction makes no progress."""
    faults = []
    detect_us, recovery_us = story.began.detect_us, story.began.recovery_us
    for relied, until_us in _runs(story.of(Relied), _relying, story.end_us):
        lasted_us = until_us - relied.at
        why = f"{relied.node} postponed its {relied.what} of {relied.path} for {lasted_us / 1e6:g}s"
        on = ", ".join(relied.on)
        if not relied.sound and lasted_us > detect_us:
            faults.append(Fault(relied.at + detect_us, f"{why}, relying on {on}: dead or idle"))
    for relied, until_us in _runs(story.of(Relied), _waiting, story.end_us):
        lasted_us = until_us - relied.at
        if relied.what == "correction" and lasted_us > recovery_us:
            on = ", ".join(relied.on)
            why = (
                f"{relied.node} waited for {on} to correct {relied.path} for {lasted_us / 1e6:g}s "
                "without progress"
            )
            faults.append(Fault(relied.at + recovery_us, why))
    return judged("promises", faults)


def detected(story: Story) -> Verdict:
    """A producer that died, hangs, was disconnected or makes no progress is soon left by its
    consumers if there is another producer. Such a replica of a pair is soon declared dead. If two
    replicas produced different rows, one of them is soon rebuilt."""
    faults = _different(story)
    for reading, until_us in _runs(story.of(Reading), _bad, story.end_us):
        lasted_us = until_us - reading.at
        if lasted_us > reading.within_us:
            producer = (
                f"{reading.stream} from {reading.replica}" if reading.replica else reading.stream
            )
            why = (
                f"{reading.consumer} reads {producer}: {reading.bad} for {lasted_us / 1e6:g}s, "
                f"allowed: {reading.within_us / 1e6:g}s"
            )
            faults.append(Fault(reading.at + reading.within_us, why))
    return judged("detected", faults)


def _different(story: Story) -> list[Fault]:
    """Pairs of instances that produced different rows of a bucket and both continued for longer
    than the time that is needed to find the wrong one."""
    last_us: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], dict[str, Made]] = {}
    differ: list[tuple[Made, Made]] = []
    for made in story.of(Made):
        last_us[made.node, made.epoch] = made.at
        if made.stability != Stability.STABLE:
            continue
        by_checksum = first.setdefault((made.stream, made.bucket), {})
        for other in by_checksum.values():
            if other.checksum != made.checksum and other.node != made.node:
                differ.append((other, made))
        by_checksum.setdefault(made.checksum, made)
    faults = []
    for one, other in differ:
        both_us = min(last_us[made.node, made.epoch] for made in (one, other)) - other.at
        if both_us > TOLD_APART_US:
            why = f"{one.node} and {other.node} produced different rows of bucket {one.bucket} of "
            why += f"{one.stream} and both continued for {both_us / 1e6:g}s"
            faults.append(Fault(other.at + TOLD_APART_US, why))
    return faults


def _relying(event: Relied) -> tuple[object, object]:
    return (event.node, event.path, event.what), (event.on, bool(event.sound)) if event.on else None


def _waiting(event: Relied) -> tuple[object, object]:
    waited = (event.on, event.reached) if event.on else None
    return (event.node, event.path, event.what), waited


def _bad(event: Reading) -> tuple[object, object]:
    return (event.consumer, event.stream), (event.replica,) if event.bad else None


def _runs(
    events: Iterable[T], keyed: Callable[[T], tuple[object, object]], end_us: int
) -> Iterator[tuple[T, int]]:
    """The first event of each period in which a value stays the same, and the end of the period.
    `keyed` returns the subject of an event and its value; periods with the value None are
    skipped."""
    by_key: dict[object, list[tuple[object, T]]] = defaultdict(list)
    for event in events:
        key, value = keyed(event)
        by_key[key].append((value, event))
    for values in by_key.values():
        first: T | None = None
        last: object = None
        for value, event in values:
            if value == last:
                continue
            if first is not None and last is not None:
                yield first, event.at
            first, last = event, value
        if first is not None and last is not None:
            yield first, end_us
