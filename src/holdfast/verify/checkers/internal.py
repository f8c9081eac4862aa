"""Checks internal properties: replicas produce the same rows, sources keep accepted rows, no
process terminates without need, and no component retains more than it needs."""

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
    """All instances and replicas that produced a stable bucket produced the same rows."""
    faults = []
    first: dict[tuple[str, int], Made] = {}
    for made in story.of(Made):
        if made.stability == Stability.STABLE:
            other = first.setdefault((made.stream, made.bucket), made)
            if other.checksum != made.checksum:
                why = (
                    f"bucket {made.bucket} of {made.stream} differs between {other.node} and "
                    f"{made.node}"
                )
                faults.append(Fault(made.at, why))
    return judged("converge", faults)


def accepted(story: Story) -> Verdict:
    """Rows that a source confirmed as durable are in its log or among its dead letters, and not
    more often than they were pushed. The checker ignores unconfirmed rows: a source may have logged
    them before a crash that prevented the confirmation."""
    safe: dict[str, list[Row]] = defaultdict(list)
    logged: dict[str, list[Row]] = defaultdict(list)
    last_us: dict[str, int] = {}
    for event in story.of(Accepted):
        safe[event.source] += event.rows
        last_us[event.source] = event.at
    for in_log in story.of(Logged):
        logged[in_log.source] += in_log.rows
    for put_aside in story.of(PutAside):
        logged[put_aside.source] += put_aside.rows
    faults = []
    for source, rows in safe.items():
        if same(tuple(rows), tuple(logged[source])):
            continue
        pushed, durable = counted(tuple(rows)), counted(tuple(logged[source]))
        for wrong, problem in (
            (pushed - durable, "accepted rows that are missing in its log"),
            ((durable - pushed) & pushed, "logged rows more often than they were pushed"),
        ):
            if wrong:
                faults.append(Fault(last_us[source], f"source {source} {problem}: {some(wrong)}"))
    return judged("accepted", faults)


def alive(story: Story) -> Verdict:
    """No process stopped because of a bug in Holdfast, and no process blamed an injected fault
    before the first fault began."""
    first_us = min((broke.at for broke in story.of(Broke)), default=None)
    return judged(
        "alive",
        [
            Fault(stop.at, f"{stop.who} stopped (fault of: {stop.fault_of}): {stop.why}")
            for stop in story.of(Stopped)
            if stop.fault_of == "ours" or first_us is None or stop.at < first_us
        ],
    )


def held(story: Story) -> Verdict:
    """Memory and disk are also bounded during a failure. Buckets that cannot be corrected yet are
    retained. Every bucket of a failure may therefore add one retained bucket per stream, but not
    two. A node that lost its storage may read every bucket again since the start of the run, and
    its log holds the results again until its consumers have acknowledged them to the new instance.
    The number of entries to scan for a decision does not grow at all."""
    began, bound = story.began, story.began.held_buckets
    faults = [
        Fault(event.at, f"{event.where}: {event.what} has {event.entries} entries to scan, "
              f"allowed: {event.most}")
        for event in story.of(Pending)
        if event.entries > event.most
    ]  # fmt: skip
    for sample in story.of(Held):
        trouble = story.trouble_at(sample.at) if sample.buckets > bound else None
        if trouble is None:  # within the bound, or already reported by `bounded`
            continue
        lost = any(
            broke.fault in ("wipe", "replace", "restore") and trouble[0] <= broke.at <= sample.at
            for broke in story.of(Broke)
            if sample.where == f"{broke.on} log"
        )
        since_us = began.at if lost or sample.where.endswith(" inputs") else trouble[0]
        most = bound + -(-(sample.at - since_us) // began.width_us)
        if sample.buckets > most:
            why = f"{sample.where} holds {sample.buckets} buckets of {sample.stream}, "
            why += f"{(sample.at - trouble[0]) / 1e6:g}s after a fault began, allowed: {most}"
            faults.append(Fault(sample.at, why))
    return judged("held", faults)
