"""What happened inside: replicas made the same, sources kept what they accepted, nobody gave up
without need, and nobody kept more than there was need for."""

from __future__ import annotations

from collections import defaultdict

from holdfast.types import Stability
from holdfast.verify.checkers.story import Story, counted, same, some
from holdfast.verify.checkers.verdict import Fault, Verdict, judged
from holdfast.verify.history import (
    Accepted,
    Broke,
    Held,
    Logged,
    Made,
    Pending,
    PutAside,
    Row,
    Stopped,
)


def converge(story: Story) -> Verdict:
    """All instances and replicas that made a stable bucket made the same."""
    faults = []
    first: dict[tuple[str, int], Made] = {}
    for made in story.of(Made):
        if made.stability == Stability.STABLE:
            other = first.setdefault((made.stream, made.bucket), made)
            if other.checksum != made.checksum:
                why = f"bucket {made.bucket} of {made.stream} differs at {other.node}, {made.node}"
                faults.append(Fault(made.at, why))
    return judged("converge", faults)


def accepted(story: Story) -> Verdict:
    """Rows that a source said are safe are in its log, be it among the dead letters, and not more
    often than they were pushed. Of
    rows that were never called safe nothing can be told: they may have been logged before the crash
    that kept the answer back."""
    safe: dict[str, list[Row]] = defaultdict(list)
    logged: dict[str, list[Row]] = defaultdict(list)
    last_us: dict[str, int] = {}
    for event in story.of(Accepted):
        safe[event.source] += event.rows
        last_us[event.source] = event.at
    for found in story.of(Logged):
        logged[found.source] += found.rows
    for put_aside in story.of(PutAside):
        logged[put_aside.source] += put_aside.rows
    faults = []
    for source, rows in safe.items():
        if same(tuple(rows), tuple(logged[source])):
            continue
        pushed, held = counted(tuple(rows)), counted(tuple(logged[source]))
        for wrong, what in (
            (pushed - held, "accepted rows that its log does not have"),
            ((held - pushed) & pushed, "logged rows more often than they were pushed"),
        ):
            if wrong:
                faults.append(Fault(last_us[source], f"source {source} {what}: {some(wrong)}"))
    return judged("accepted", faults)


def alive(story: Story) -> Verdict:
    """Nobody stopped over a mistake of ours, and nobody blamed the world before it broke."""
    first_us = min((broke.at for broke in story.of(Broke)), default=None)
    return judged(
        "alive",
        [
            Fault(stop.at, f"{stop.who} stopped, the fault of {stop.fault_of}: {stop.why}")
            for stop in story.of(Stopped)
            if stop.fault_of == "ours" or first_us is None or stop.at < first_us
        ],
    )


def held(story: Story) -> Verdict:
    """Memory and disk are bounded in a failure, too. What cannot be corrected yet is kept, so that
    with every bucket of a failure one bucket more may be kept of a stream, but not two; a node that
    lost its storage may read every bucket again since the beginning. What has to be gone through to
    decide something does not grow at all."""
    began, bound = story.began, story.began.held_buckets
    faults = [
        Fault(event.at, f"{event.where}: {event.what} has {event.entries} entries to go through, "
              f"and at most {event.most} are granted")
        for event in story.of(Pending)
        if event.entries > event.most
    ]  # fmt: skip
    for kept in story.of(Held):
        trouble = story.trouble_at(kept.at) if kept.buckets > bound else None
        if trouble is None:  # or `bounded` has said so
            continue
        since_us = began.at if kept.where.endswith(" inputs") else trouble[0]
        most = bound + -(-(kept.at - since_us) // began.width_us)
        if kept.buckets > most:
            why = f"{kept.where} holds {kept.buckets} buckets of {kept.stream}, "
            why += f"{(kept.at - trouble[0]) / 1e6:g}s after something broke; {most} are granted"
            faults.append(Fault(kept.at, why))
    return judged("held", faults)
