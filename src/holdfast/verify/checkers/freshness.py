"""Checks the age of the newest valid result, which is what the user of an output notices. The check
also applies while a fault is active."""

from __future__ import annotations

from itertools import pairwise, zip_longest

from holdfast.verify.checkers.story import NEVER_US, Consumer, Story
from holdfast.verify.checkers.verdict import Fault, Verdict, judged
from holdfast.verify.history import Owed, Promised


def standing(story: Story) -> Verdict:
    """While a result is owed, the newest valid result is not older than the bound. A tentative
    result remains valid until another version of its bucket replaces it."""
    faults = []
    for promise in story.promises:
        consumer = story.consumer(promise)
        for since_us, until_us, age_us in _owed(story, promise):
            faults += _too_old(story, consumer, since_us, until_us, age_us)
    return judged("standing", faults)


def newest_age_us(story: Story, consumer: Consumer, since_us: int, until_us: int) -> int:
    """The maximum age of the newest valid result between two instants, counted from the end of its
    bucket, or from the start of the run if there was no result yet."""
    return max((age for _, _, age in _ages(story, consumer, since_us, until_us)), default=0)


def _too_old(
    story: Story, consumer: Consumer, since_us: int, until_us: int, age_us: int
) -> list[Fault]:
    return [
        Fault(
            max(at, until - age + age_us),
            f"{consumer}: the newest valid result was {age / 1e6:g}s old, "
            f"allowed: {age_us / 1e6:g}s",
        )
        for at, until, age in _ages(story, consumer, since_us, until_us)
        if age > age_us
    ]


def _ages(
    story: Story, consumer: Consumer, since_us: int, until_us: int
) -> list[tuple[int, int, int]]:
    """Between two instants: from and until when each result was the newest, and its final age."""
    if until_us <= since_us:
        return []
    width_us = story.began.width_us
    steps = [(story.began.at, story.began.at // width_us - 1), *consumer.newest, (NEVER_US, 0)]
    return [
        (max(at, since_us), min(to, until_us), min(to, until_us) - (bucket + 1) * width_us)
        for (at, bucket), (to, _) in pairwise(steps)
        if to > since_us and at < until_us
    ]


def _owed(story: Story, promise: Promised) -> list[tuple[int, int, int]]:
    """Periods in which a result is owed: start, end, and the maximum age of the newest result."""
    demands = [
        e for e in story.of(Owed) if (e.client, e.output) == (promise.client, promise.output)
    ]
    return [
        (owed.at, story.end_us if after is None else after.at, owed.age_us)
        for owed, after in zip_longest(demands, demands[1:])
        if owed.age_us is not None
    ]
