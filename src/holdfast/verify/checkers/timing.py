"""Checks timing: when clients received their buckets, how many buckets were held in the meantime,
and whether the monitor reported broken promises. `delay` and `bounded` are suspended while a fault
is active or the run recovers; the other checkers also apply during failures."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, zip_longest

import numpy as np

from holdfast.model.levels import Ints
from holdfast.model.trees import Kind
from holdfast.verify.checkers.story import NEVER_US, Story, counted, overlaps
from holdfast.verify.checkers.verdict import Fault, Verdict, judged
from holdfast.verify.history import (
    AtBound,
    Deserted,
    Expected,
    Healed,
    Held,
    Outlived,
    Promised,
    Reported,
    Restored,
)

#: Maximum time between two closings of a source, in bucket widths: half speed, plus a late timer.
CLOSING_WIDTHS = 4
#: After its clock was stepped, a source may not run ahead by more than `AHEAD_US` (the lateness of
#: a timer) until the new time has lasted as long as the step, at most `STEPPED_US_MAX`.
AHEAD_US, STEPPED_US_MAX = 1_500_000, 10_000_000


def delay(story: Story) -> Verdict:
    """Without faults, a client knows a bucket at most `delay_us` after the bucket is over and
    closed, and at most `within_us` after its start where the contract promises that."""
    faults = []
    width_us, delay_us = story.began.width_us, story.began.delay_us
    for promise in story.promises:
        consumer = story.consumer(promise)
        buckets, due_us, known_us = _moments(story, promise)
        start_us = buckets * width_us
        demands = [(due_us, delay_us, "after its end and closing")]
        if promise.within_us is not None:
            demands.append((start_us, promise.within_us, "after its start"))
        for since_us, bound_us, since in demands:
            for at in np.flatnonzero(known_us - since_us > bound_us):
                if story.troubled(int(since_us[at]), int(known_us[at])):
                    continue
                late_us = int(known_us[at] - since_us[at])
                why = (
                    f"{consumer}: bucket {buckets[at]} arrived {late_us / 1e6:g}s {since}, "
                    f"allowed: {bound_us / 1e6:g}s"
                )
                faults.append(Fault(int(since_us[at]) + bound_us, why))
    return judged("delay", faults)


def available(story: Story) -> Verdict:
    """Property 1 (Borealis section 3.5): in a static state of failure, a client with a stable tree,
    or otherwise a tentative tree, receives every bucket in time, possibly as tentative. A client
    with a stable tree receives no tentative bucket. At no time do all replicas of a fragment
    correct while each relies on another to answer."""
    faults = [
        Fault(event.at, f"all replicas of {event.fragment} correct {event.path} at the same time")
        for event in story.of(Deserted)
    ]
    width_us = story.began.width_us
    for promise in story.promises:
        consumer = story.consumer(promise)
        hinted = [(event.at, event.upto) for event in consumer.hinted]
        for since_us, until_us, expected in _stretches(story, promise):
            if expected.kind not in (Kind.STABLE, Kind.TENTATIVE):
                continue
            first = -(-(since_us + expected.settle_us) // width_us)
            if expected.kind == Kind.STABLE:
                faults += [
                    Fault(given.at, f"{consumer}: bucket {given.bucket} arrived as tentative, "
                          f"with a stable tree since {since_us / 1e6:.3f}s")
                    for given in consumer.tentative
                    if given.bucket >= first and given.at <= until_us
                ]  # fmt: skip
            last = (until_us - expected.within_us) // width_us - 1
            if first > last:
                continue
            buckets = np.arange(first, last + 1, dtype=np.int64)
            due_us = (buckets + 1) * width_us + expected.within_us
            late = np.flatnonzero(_first_reaching(hinted, buckets) > due_us)
            faults += [
                Fault(
                    int(due_us[at]),
                    f"{consumer}: bucket {buckets[at]} was not available "
                    f"{expected.within_us / 1e6:g}s after its end, with a {expected.kind} tree "
                    f"since {since_us / 1e6:.3f}s",
                )
                for at in late
            ]
    return judged("available", faults)


def labelled(story: Story) -> Verdict:
    """A tentative bucket reports how partial it is: the missing inputs, and the share of the inputs
    that were available. If no input is missing, the rows are the ideal rows."""
    faults = []
    for promise in story.promises:
        consumer = story.consumer(promise)
        for given in consumer.tentative:
            names = ", ".join(given.missing) or "nothing"
            label = f"{consumer}: bucket {given.bucket}: missing {names}"
            if not 0 <= given.inputs_share <= 1 or (given.inputs_share < 1) != bool(given.missing):
                why = f"{label}, but reports {given.inputs_share:g} of its inputs"
                faults.append(Fault(given.at, why))
            ideal = consumer.ideal.get(given.bucket, ())
            if not given.missing and counted(given.rows) != counted(ideal):
                faults.append(Fault(given.at, f"{label}, but its rows are not the ideal rows"))
    return judged("labelled", faults)


def _stretches(story: Story, promise: Promised) -> Iterable[tuple[int, int, Expected]]:
    """Periods without a new or healed fault: start, end, and the expectation. Periods end when the
    last source is done."""
    expectations = [
        e for e in story.of(Expected) if (e.client, e.output) == (promise.client, promise.output)
    ]
    over_us = max(
        (
            min((c.at for c in story.closings[source] if c.upto >= NEVER_US), default=story.end_us)
            for source in promise.sources
        ),
        default=story.end_us,
    )
    for expected, after in zip_longest(expectations, expectations[1:]):
        until_us = over_us if after is None else min(after.at, over_us)
        cuts = [event.at for event in story.changes if expected.at < event.at < until_us]
        for since_us, to_us in pairwise([expected.at, *cuts, until_us]):
            yield since_us, to_us, expected


def bounded(story: Story) -> Verdict:
    """Without faults, no component holds more buckets than the bound."""
    bound = story.began.held_buckets
    return judged(
        "bounded",
        [
            Fault(sample.at, f"{sample.where} holds {sample.buckets} buckets of {sample.stream}")
            for sample in story.of(Held)
            if sample.buckets > bound and not story.troubled(sample.at, sample.at)
        ],
    )


def closing(story: Story) -> Verdict:
    """A source closes buckets even if its clock is stepped: at least at half speed, not far ahead
    because of a recent clock step, and soon on time again. A source whose clock was never stepped
    closes no bucket before its end. Periods in which the buffer of the source is at its bound are
    exempt."""
    faults = []
    width_us = story.began.width_us
    for source, closings in story.closings.items():
        full_at = [event.at for event in story.of(AtBound) if event.source == source]
        stepped_at = [
            event.at - (event.felt_us if isinstance(event, Healed) else 0)
            for event in story.changes
            if (event.fault, event.on) == ("skew", source)
        ]
        steady = story.began.wall and not any(
            e.fault in ("skew", "clock") and e.on == source for e in story.changes
        )
        faults += [
            Fault(early.at, f"source {source} closed bucket {early.upto} before its end")
            for early in closings
            if steady and early.at < (early.upto + 1) * width_us and early.upto < NEVER_US
        ]
        for last, closed in pairwise(closings):
            if any(last.at <= at <= closed.at for at in full_at):
                continue
            trouble = [
                until
                for since, until in story.trouble_beside_clocks
                if since <= closed.at and last.at <= until
            ]
            passed_us = closed.at - max([last.at, *trouble])
            if passed_us > CLOSING_WIDTHS * width_us:
                why = f"source {source} closed no bucket for {passed_us / 1e6:g}s"
                faults.append(Fault(closed.at, why))
            behind_us = closed.at - (closed.upto + 1) * width_us
            late = behind_us > CLOSING_WIDTHS * width_us
            if late and not overlaps(story.trouble_of_sources, last.at, closed.at):
                why = (
                    f"source {source} closed bucket {closed.upto} {behind_us / 1e6:g}s after its "
                    "end"
                )
                faults.append(Fault(closed.at, why))
            ahead_us = (closed.upto - last.upto) * width_us - passed_us
            stepped_us = min(ahead_us, STEPPED_US_MAX) - AHEAD_US
            lately = any(closed.at - stepped_us < at <= closed.at for at in stepped_at)
            if lately and not trouble and closed.upto < NEVER_US and ahead_us > AHEAD_US:
                why = (
                    f"source {source} ran {ahead_us / 1e6:g}s ahead just after its clock was "
                    "stepped"
                )
                faults.append(Fault(closed.at, why))
    return judged("closing", faults)


def paired(story: Story) -> Verdict:
    """The loss of one replica of a pair has no lasting cost (Flux sections 3.2 and 3.3): upstream
    does not retain buckets for the dead replica, and its replacement soon catches up."""
    bound_us = 2 * story.began.recovery_us // 3
    late = [
        Fault(
            restored.at,
            f"the rebuild of {restored.node} took {(restored.at - restored.since) / 1e6:g}s",
        )
        for restored in story.of(Restored)
        if restored.calm and restored.at - restored.since > bound_us
    ]
    retained = [
        Fault(
            retained.at,
            f"{retained.where} retains {retained.buckets} buckets of {retained.stream} for dead "
            "consumers",
        )
        for retained in story.of(Outlived)
    ]
    return judged("paired", late + retained)


def reported(story: Story) -> Verdict:
    """A broken promise is reported by the monitor within two bucket widths. A tentative result in
    time keeps the promise. A report that was not withdrawn also covers the following buckets."""
    faults = []
    width_us = story.began.width_us
    for promise in story.promises:
        if promise.within_us is None:
            continue
        buckets, _, known_us = _moments(story, promise)
        hinted = [(event.at, event.upto) for event in story.consumer(promise).hinted]
        known_us = np.minimum(known_us, _first_reaching(hinted, buckets))
        broken_us = (buckets + 1) * width_us + promise.within_us
        report_by_us = broken_us + 2 * width_us
        reports = story.reports.get(promise.output, [])
        for at in np.flatnonzero((known_us > broken_us) & (report_by_us <= story.end_us)):
            bucket, since_us, by_us = int(buckets[at]), int(broken_us[at]), int(report_by_us[at])
            if not _is_reported(reports, bucket, since_us, by_us):
                why = (
                    f"output {promise.output}: the monitor did not report that bucket {bucket} was "
                    "late"
                )
                faults.append(Fault(by_us, why))
    return judged("reported", faults)


def _is_reported(reports: Iterable[Reported], bucket: int, since_us: int, by_us: int) -> bool:
    broken = False
    for report in reports:
        if report.at > by_us:
            break
        if not report.kept and (report.bucket == bucket or report.at >= since_us):
            return True
        if report.at < since_us:
            broken = not report.kept
    return broken


def _moments(story: Story, promise: Promised) -> tuple[Ints, Ints, Ints]:
    """The buckets that were over and closed by all sources within the run; when they were due; and
    when the client knew of them, or the end of the run if it never did."""
    began, end_us = story.began, story.end_us
    upto = min(story.closed_upto(promise), end_us // began.width_us - 1)
    buckets = np.arange(began.at // began.width_us, upto + 1, dtype=np.int64)
    due_us = (buckets + 1) * began.width_us
    for source in promise.sources:
        closings = [(closed.at, closed.upto) for closed in story.closings[source]]
        due_us = np.maximum(due_us, _first_reaching(closings, buckets))
    consumer = story.consumer(promise)
    known_us = _first_reaching(
        [(position.at, position.upto) for position in consumer.progress], buckets
    )
    for bucket, events in consumer.stable.items():
        if len(buckets) and buckets[0] <= bucket <= buckets[-1]:
            place = bucket - buckets[0]
            known_us[place] = min(known_us[place], events[0].at)
    return buckets, due_us, np.minimum(known_us, end_us)


def _first_reaching(steps: list[tuple[int, int]], buckets: Ints) -> Ints:
    """When each bucket was first reached, given steps of (instant, up to bucket)."""
    at_us = np.array([at for at, _ in steps] + [NEVER_US], np.int64)
    upto = np.maximum.accumulate(np.array([upto for _, upto in steps], np.int64))
    return at_us[np.searchsorted(upto, buckets, side="left")]
