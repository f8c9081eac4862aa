"""Checks the rows that clients received against the ideal rows: no row is lost, duplicated or
wrong, no stable row changes, every tentative bucket is corrected, buckets arrive in order, and the
contracts hold."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from holdfast.model.levels import Matched, evaluate
from holdfast.types import Stability
from holdfast.verify.checkers.story import Consumer, Story, counted, same, some
from holdfast.verify.checkers.verdict import Fault, Verdict, judged
from holdfast.verify.history import Began, Concluded, Given, Progressed, Promised, Row


def lost(story: Story) -> Verdict:
    """Every row of a bucket that its sources closed was delivered and remains valid. In a run that
    had no time to settle, a row counts as lost only if the client was notified that its bucket is
    complete."""
    faults = []
    for promise in story.promises:
        consumer = story.consumer(promise)
        due = story.closed_upto(promise)
        if not story.settled:
            due = min(due, consumer.progress_upto)
        faults += [
            Fault(
                _end_us(story, bucket),
                f"{consumer}: missing in bucket {bucket}: {some(gap.missing)}",
            )
            for bucket, gap in consumer.gaps.items()
            if bucket <= due and gap.missing
        ]
    if faults or story.settled:
        return judged("lost", faults)
    changed_us = story.changes[-1].at if story.changes else story.began.at
    if story.end_us > changed_us + story.began.recovery_us:
        return Verdict(
            "lost", "failed", "the run did not settle within the recovery time", story.end_us
        )
    return Verdict(
        "lost", "unknown", "the run ended before the recovery time was over", story.end_us
    )


def doubled(story: Story) -> Verdict:
    """No ideal row was delivered more often, over all buckets, than the ideal contains it. Rows
    that the ideal does not contain at all are `wrong`, however often they were delivered."""
    faults = []
    for consumer in story.consumers.values():
        surplus = {at: gap.surplus for at, gap in consumer.gaps.items() if gap.surplus}
        if not surplus:
            continue
        ideal = counted(*consumer.ideal.values())
        delivered = counted(*(e.rows for events in consumer.stable.values() for e in events))
        too_often = delivered - ideal
        for bucket, rows in surplus.items():
            duplicates = Counter(
                {row: n for row, n in rows.items() if ideal[row] and too_often[row]}
            )
            if duplicates:
                why = f"{consumer}: duplicate rows in bucket {bucket}: {some(duplicates)}"
                faults.append(Fault(consumer.stable[bucket][-1].at, why))
    return judged("doubled", faults)


def wrong(story: Story) -> Verdict:
    """No stable row was delivered that the ideal does not contain in that bucket."""
    faults = []
    for consumer in story.consumers.values():
        for bucket, gap in consumer.gaps.items():
            ideal: Counter[Row] = (
                counted(consumer.ideal.get(bucket, ())) if gap.surplus else Counter()
            )
            unexpected = Counter({row: n for row, n in gap.surplus.items() if not ideal[row]})
            if unexpected:
                why = f"{consumer}: wrong rows in bucket {bucket}: {some(unexpected)}"
                faults.append(Fault(consumer.stable[bucket][0].at, why))
    return judged("wrong", faults)


def undone(story: Story) -> Verdict:
    """Stable buckets never change: no stable bucket is delivered again with different rows."""
    faults = []
    for consumer in story.consumers.values():
        for bucket, (first, *again) in consumer.stable.items():
            faults += [
                Fault(e.at, f"{consumer}: stable bucket {bucket} arrived again with different rows")
                for e in again
                if not same(first.rows, e.rows)
            ]
    return judged("undone", faults)


def corrected(story: Story) -> Verdict:
    """Every tentative bucket is later delivered as stable, empty or not. A client reports which
    rows replace tentative ones. A client reports REC_DONE when all of its buckets are stable, and
    not before."""
    faults = []
    announces = any(began.announces for began in story.of(Began))
    for consumer in story.consumers.values():
        faults += _concluded(consumer) if announces else []
        faults += [
            Fault(at, f"{consumer}: bucket {bucket} stays tentative")
            for bucket, at in _tentative(consumer).items()
        ]
    if faults and not story.settled:
        return Verdict("corrected", "unknown", "the run did not settle", story.end_us)
    return judged("corrected", faults)


def _concluded(consumer: Consumer) -> list[Fault]:
    faults = []
    tentative: set[int] = set()
    owed_since: int | None = None
    for event in consumer.readings:
        if type(event) is Given:
            if event.bucket in tentative and not event.replaces:
                why = (
                    f"{consumer}: bucket {event.bucket} replaces a tentative bucket, but is not "
                    "marked as a replacement"
                )
                faults.append(Fault(event.at, why))
            if event.stability == Stability.TENTATIVE:
                tentative.add(event.bucket)
            elif event.bucket in tentative:
                tentative.remove(event.bucket)
                owed_since = event.at
        elif type(event) is Concluded:
            owed_since = None
            if tentative:
                why = f"{consumer}: REC_DONE while bucket {min(tentative)} stays tentative"
                faults.append(Fault(event.at, why))
    if owed_since is not None and not tentative:
        faults.append(
            Fault(owed_since, f"{consumer}: all buckets are stable, but REC_DONE never arrived")
        )
    return faults


def _tentative(consumer: Consumer) -> dict[int, int]:
    """Buckets that were tentative and never became stable, with the time of the last delivery."""
    tentative: dict[int, int] = {}
    for event in consumer.readings:
        if type(event) is Given:
            if event.stability == Stability.TENTATIVE:
                tentative[event.bucket] = event.at
            elif tentative:
                tentative.pop(event.bucket, None)
    return tentative


def order(story: Story) -> Verdict:
    """The numbers of stable buckets increase, and the position up to which an output is stable
    never decreases. A tentative bucket is delivered again only as a newer version, and never after
    its stable version."""
    faults = []
    for consumer in story.consumers.values():
        faults += _tentative_again(consumer)
        stable = [
            event
            for event in consumer.readings
            if type(event) is Given and event.stability == Stability.STABLE
        ]
        faults += [
            Fault(then.at, f"{consumer}: bucket {then.bucket} arrived after bucket {first.bucket}")
            for first, then in pairwise(stable)
            if then.bucket <= first.bucket
        ]
        faults += [
            Fault(then.at, f"{consumer}: stable position fell from {first.upto} to {then.upto}")
            for first, then in pairwise(consumer.progress)
            if then.upto < first.upto
        ]
    return judged("order", faults)


def _tentative_again(consumer: Consumer) -> list[Fault]:
    faults = []
    stable_upto: int | None = None
    versions: dict[int, int] = {}
    for event in consumer.readings:
        if type(event) is Progressed:
            stable_upto = event.upto if stable_upto is None else max(stable_upto, event.upto)
        elif type(event) is Given and event.stability == Stability.TENTATIVE:
            bucket, version = event.bucket, event.version
            if stable_upto is not None and bucket <= stable_upto:
                why = f"{consumer}: tentative bucket {bucket} arrived, but the output is stable up"
                faults.append(Fault(event.at, f"{why} to {stable_upto}"))
            elif versions.get(bucket, -1) >= version:
                why = (
                    f"{consumer}: tentative bucket {bucket} arrived again: version {version} after"
                )
                faults.append(Fault(event.at, f"{why} {versions[bucket]}"))
            versions[bucket] = version
    return faults


def contract(story: Story) -> Verdict:
    """Loss, error and order are as promised, measured as the levels of ECOC section 2.5. `delay`
    judges delays, because that checker takes into account when a fault was active."""
    if not story.settled:
        return Verdict("contract", "unknown", "the run did not settle", story.end_us)
    faults = []
    streams = {str(story.consumer(p)): _matched(story, p) for p in story.promises}
    across = any(promise.order == "inter" for promise in story.promises)
    inversions = evaluate(streams).inversions if across else 0
    for promise in story.promises:
        name = str(story.consumer(promise))
        reached = evaluate({name: streams[name]})
        broken = []
        if reached.loss_share > promise.loss:
            broken.append(f"loss is {reached.loss_share:.6g}, promised at most {promise.loss:g}")
        if reached.error_factor > promise.error:
            broken.append(
                f"error is {reached.error_factor:.6g}, promised at most {promise.error:g}"
            )
        if promise.order != "none" and not reached.iaso:
            broken.append("buckets are not in order")
        if promise.order == "inter" and inversions:
            broken.append(f"order across outputs: {inversions} rows arrived too early")
        faults += [Fault(story.end_us, f"{name}: {text}") for text in broken]
    return judged("contract", faults)


def _matched(story: Story, promise: Promised) -> Matched:
    """Matches delivered rows with ideal rows. The sequence number of a row is its bucket: rows
    within a bucket have no order, and ideally all of them arrive at the end of the bucket. A bucket
    counts if its sources closed it, or if the bucket was delivered."""
    consumer = story.consumer(promise)
    due = story.closed_upto(promise)
    ideal_rows = false_rows = 0
    counts: list[tuple[int, int, int]] = []  # bucket, instant, correct rows
    for bucket in sorted(consumer.ideal.keys() | consumer.stable.keys()):
        ideal, deliveries = consumer.ideal.get(bucket, ()), consumer.stable.get(bucket, [])
        if bucket > due and not deliveries:
            continue
        ideal_rows += len(ideal)
        if bucket not in consumer.gaps and len(deliveries) == 1:
            counts.append((bucket, deliveries[0].at, len(ideal)))
            continue
        unmatched = counted(ideal)
        for event in deliveries:
            arrived = counted(event.rows)
            correct = (arrived & unmatched).total()
            false_rows += len(event.rows) - correct
            counts.append((bucket, event.at, correct))
            unmatched -= arrived
    buckets, at_us, rows = np.array(counts, np.int64).reshape(-1, 3).T
    seq = np.repeat(buckets, rows)
    ideal_at_us = (seq + 1) * story.began.width_us
    return Matched(ideal_rows, false_rows, seq, ideal_at_us, np.repeat(at_us, rows))


def _end_us(story: Story, bucket: int) -> int:
    return (bucket + 1) * story.began.width_us
