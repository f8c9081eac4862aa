"""An index of a history, built in one pass and arranged for the queries of the checkers.

Checkers run thousands of times, so results are computed once and cached. Rows are counted only
where the rows of a bucket differ from the ideal: in a correct run they are nearly always equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from typing import Any, TypeVar

from holdfast.errors import InputError
from holdfast.types import Stability
from holdfast.verify.history import (
    Began,
    Broke,
    Closed,
    Concluded,
    Finished,
    Given,
    Healed,
    Hinted,
    History,
    Ideal,
    Progressed,
    Promised,
    Reported,
    Row,
)

T = TypeVar("T")
Rows = tuple[Row, ...]
Reading = Given | Progressed | Hinted | Concluded
#: Later than every instant of a run.
NEVER_US = 2**62


class Story:
    def __init__(self, history: History) -> None:
        self._of: dict[type, list[Any]] = defaultdict(list)
        readings: dict[tuple[str, str], list[Reading]] = defaultdict(list)
        for event in history.events:
            self._of[type(event)].append(event)
            if isinstance(event, (Given, Progressed, Hinted, Concluded)):
                readings[event.client, event.output].append(event)
        self.promises = self.of(Promised)
        for promise in self.promises:
            readings[promise.client, promise.output]  # a client that received nothing also counts
        ideal: dict[str, dict[int, Rows]] = defaultdict(dict)
        for result in self.of(Ideal):
            of_output = ideal[result.output]
            of_output[result.bucket] = of_output.get(result.bucket, ()) + result.rows
        self.consumers = {
            key: Consumer(*key, events, ideal[key[1]]) for key, events in readings.items()
        }
        finished = self.of(Finished)
        self.settled = bool(finished) and finished[-1].settled
        self.end_us = (
            finished[-1].at if finished else max((e.at for e in history.events), default=0)
        )

    def of(self, kind: type[T]) -> list[T]:
        return self._of[kind]

    def consumer(self, promise: Promised) -> Consumer:
        return self.consumers[promise.client, promise.output]

    @property
    def began(self) -> Began:
        began = self.of(Began)
        if not began:
            raise InputError("the history does not state the bounds of the run (no event `began`)")
        return began[0]

    @cached_property
    def changes(self) -> list[Broke | Healed]:
        changes: list[Broke | Healed] = [*self.of(Broke), *self.of(Healed)]
        return sorted(changes, key=lambda event: event.at)

    @cached_property
    def trouble(self) -> list[tuple[int, int]]:
        """Periods, as (from, to), in which no timing is demanded: from the start of each fault
        until the recovery time after it has healed. A fault that never heals has no end."""
        return self._spans(self.changes)

    @cached_property
    def trouble_of_sources(self) -> list[tuple[int, int]]:
        """`trouble`, but each fault ends without its after-effects (`felt_us`). Sources are judged
        by how they follow a clock after its correction, so that this time must not be excused."""
        return self._spans([
            replace(event, at=event.at - event.felt_us) if isinstance(event, Healed) else event
            for event in self.changes
        ])  # fmt: skip

    @cached_property
    def trouble_beside_clocks(self) -> list[tuple[int, int]]:
        """`trouble` without `skew` faults, to which sources must react at once."""
        return self._spans([event for event in self.changes if event.fault != "skew"])

    def _spans(self, changes: list[Broke | Healed]) -> list[tuple[int, int]]:
        open_since: dict[tuple[str, str], list[int]] = defaultdict(list)
        spans = []
        for event in changes:
            since = open_since[event.fault, event.on]
            if isinstance(event, Broke):
                since.append(event.at)
            elif since:
                spans.append((since.pop(0), event.at + self.began.recovery_us))
        return spans + [(at, NEVER_US) for since in open_since.values() for at in since]

    @cached_property
    def troubles(self) -> list[tuple[int, int]]:
        """The periods of `trouble` in order of time, with overlapping periods merged."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted(self.trouble):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def trouble_at(self, at: int) -> tuple[int, int] | None:
        """The period of trouble that contains this instant, as (from, to)."""
        return next((span for span in self.troubles if span[0] <= at <= span[1]), None)

    def troubled(self, from_us: int, to_us: int) -> bool:
        return overlaps(self.trouble, from_us, to_us)

    @cached_property
    def closings(self) -> dict[str, list[Closed]]:
        closings: dict[str, list[Closed]] = defaultdict(list)
        for event in self.of(Closed):
            closings[event.source].append(event)
        return closings

    def closed_upto(self, promise: Promised) -> int:
        """The bucket up to which every source of an output has closed its buckets."""
        upto = [
            max((closed.upto for closed in self.closings.get(source, ())), default=-NEVER_US)
            for source in promise.sources
        ]
        return min(upto, default=NEVER_US)

    @cached_property
    def reports(self) -> dict[str, list[Reported]]:
        reports: dict[str, list[Reported]] = defaultdict(list)
        for event in self.of(Reported):
            reports[event.output].append(event)
        return reports


def overlaps(spans: list[tuple[int, int]], from_us: int, to_us: int) -> bool:
    return any(start <= to_us and from_us <= end for start, end in spans)


@dataclass
class Consumer:
    """The events of one client for one output."""

    client: str
    output: str
    #: In order of time.
    readings: list[Reading]
    #: Rows that an ideal system would have delivered, per bucket; absent buckets are empty.
    ideal: dict[int, Rows]

    def __str__(self) -> str:
        return f"output {self.output} at client {self.client}"

    @cached_property
    def progress(self) -> list[Progressed]:
        return [event for event in self.readings if type(event) is Progressed]

    @cached_property
    def hinted(self) -> list[Hinted]:
        return [event for event in self.readings if type(event) is Hinted]

    @cached_property
    def tentative(self) -> list[Given]:
        given = (event for event in self.readings if type(event) is Given)
        return [event for event in given if event.stability == Stability.TENTATIVE]

    @cached_property
    def newest(self) -> list[tuple[int, int]]:
        """Steps (instant, bucket): the newest valid bucket from this instant on, stable or
        tentative. A replacement has the same bucket, so the bucket number only increases. There is
        one step per instant at which the newest bucket changed."""
        steps: list[tuple[int, int]] = []
        now = -NEVER_US
        for event in self.readings:
            if isinstance(event, Concluded):
                continue
            reached = event.bucket if isinstance(event, Given) else event.upto
            if reached <= now:
                continue
            now = reached
            if steps and steps[-1][0] == event.at:
                steps.pop()
            steps.append((event.at, now))
        return steps

    @cached_property
    def progress_upto(self) -> int:
        return max((event.upto for event in self.progress), default=-NEVER_US)

    @cached_property
    def stable(self) -> dict[int, list[Given]]:
        """Per bucket, the stable deliveries."""
        stable: dict[int, list[Given]] = {}
        for event in self.readings:
            if type(event) is Given and event.stability == Stability.STABLE:
                stable.setdefault(event.bucket, []).append(event)
        return stable

    @cached_property
    def gaps(self) -> dict[int, Gap]:
        """The differences between stable rows and ideal rows, for the buckets that have any."""
        gaps = {}
        for bucket in sorted(self.ideal.keys() | self.stable.keys()):
            ideal, deliveries = self.ideal.get(bucket, ()), self.stable.get(bucket, ())
            if len(deliveries) == 1 and same(deliveries[0].rows, ideal):
                continue
            expected, delivered = counted(ideal), counted(*(event.rows for event in deliveries))
            if expected != delivered:
                gaps[bucket] = Gap(expected - delivered, delivered - expected)
        return gaps


@dataclass(frozen=True)
class Gap:
    missing: Counter[Row]
    surplus: Counter[Row]


def counted(*rows: Rows) -> Counter[Row]:
    """Rows as a multiset, in which NaN is equal to itself."""
    return Counter(
        tuple([nan if value != value else value for value in row]) for part in rows for row in part
    )


def same(rows: Rows, other: Rows) -> bool:
    """Whether rows are the same, in any order. Two cheap comparisons precede the counting."""
    if rows == other:
        return True
    if len(rows) != len(other):
        return False
    distinct = set(rows)
    if len(distinct) == len(rows) and distinct == set(other):
        return True
    return counted(rows) == counted(other)


def some(rows: Counter[Row]) -> str:
    """Up to three rows, and the number of the remaining ones."""
    shown = ", ".join(str(row) for row in list(rows.elements())[:3])
    remaining = rows.total() - 3
    return f"{shown} and {remaining} more" if remaining > 0 else shown
