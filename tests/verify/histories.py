"""A correct history, and helpers that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from holdfast.verify.checkers import Verdict, check
from holdfast.verify.history import (
    Accepted,
    Began,
    Broke,
    Closed,
    Event,
    Finished,
    Given,
    Healed,
    Held,
    History,
    Ideal,
    Logged,
    Made,
    Progressed,
    Promised,
    Row,
)

WIDTH_US = 100_000
DELAY_US = 50_000
RECOVERY_US = 300_000
BUCKETS = 20
END_US = (BUCKETS + 5) * WIDTH_US
#: In the middle of bucket 7, and of bucket 11.
BROKE_US, HEALED_US = 750_000, 1_150_000
EMPTY = 4


def rows(bucket: int, count: int = 10) -> tuple[Row, ...]:
    """Bucket 4 is empty."""
    if bucket == EMPTY:
        return ()
    return tuple((bucket * WIDTH_US + at, f"k{at % 3}", at / 2) for at in range(count))


def end_us(bucket: int) -> int:
    return (bucket + 1) * WIDTH_US


def story(
    *extra: Event,
    without: Callable[[Event], bool] = lambda event: False,
    change: Callable[[Event], Event] = lambda event: event,
    buckets: int = BUCKETS,
) -> History:
    """A run without faults: two sources, two replicas, a client of each output."""
    last_us = (buckets + 5) * WIDTH_US
    events: list[Event] = [
        Began(0, "net", WIDTH_US, DELAY_US, RECOVERY_US, held_buckets=3),
        Promised(0, "c", "out", ("one", "two"), within_us=WIDTH_US + DELAY_US),
        Promised(0, "d", "other", ("one",), order="inter"),
        Finished(last_us, settled=True),
    ]
    for bucket in range(buckets):
        ended_us = end_us(bucket)
        events += [
            Accepted(ended_us - 10, "one", rows(bucket)),
            Logged(ended_us, "one", bucket, rows(bucket)),
        ]
        events += [Closed(ended_us + 1_000, source, bucket) for source in ("one", "two")]
        for node in ("n1", "n2"):
            events.append(
                Made(ended_us + 2_000, node, 1, "out", bucket, "STABLE", f"{bucket:016x}")
            )
            events.append(Held(ended_us + 2_000, node, "one", 2))
        for client, output, at in (
            ("c", "out", ended_us + 10_000),
            ("d", "other", ended_us + 12_000),
        ):
            events.append(Ideal(ended_us, output, bucket, rows(bucket)))
            if rows(bucket):
                events.append(Given(at, client, output, bucket, rows(bucket)))
            events.append(Progressed(at + 1, client, output, bucket))
    changed = [change(event) for event in events if not without(event)]
    return History(sorted([*changed, *extra], key=lambda event: event.at))


def failed(history: History, **options: bool) -> dict[str, str]:
    return {v.checker: v.why for v in check(history, **options) if v.outcome == "failed"}


def verdict(history: History, checker: str, **options: bool) -> Verdict:
    return next(v for v in check(history, **options) if v.checker == checker)


def of_bucket(kind: type[Event], bucket: int, output: str = "out") -> Callable[[Event], bool]:
    def fits(event: Event) -> bool:
        return (
            isinstance(event, kind)
            and getattr(event, "output", output) == output
            and getattr(event, "bucket", getattr(event, "upto", None)) == bucket
        )

    return fits


def given_as(bucket: int, to: Iterable[Row], output: str = "out") -> Callable[[Event], Event]:
    fits = of_bucket(Given, bucket, output)
    return lambda event: (
        replace(event, rows=tuple(to)) if isinstance(event, Given) and fits(event) else event
    )


def tentative_of(at: int, bucket: int, rows: tuple[Row, ...]) -> Given:
    """A tentative bucket without the second of two inputs."""
    missing = ("two",)
    return Given(at, "c", "out", bucket, rows, "TENTATIVE", missing=missing, inputs_share=0.5)


def unsettled(at: int) -> Callable[[Event], Event]:
    return lambda event: Finished(at, settled=False) if isinstance(event, Finished) else event


BROKE = Broke(BROKE_US, "kill", "n1")
HEALED = Healed(HEALED_US, "kill", "n1")
