"""What the user of an output notices: how old the newest result is that still stands. This is
asked while something is broken, too."""

from __future__ import annotations

from itertools import pairwise, zip_longest

from holdfast.verify.checkers.story import NEVER_US, Reader, Story
from holdfast.verify.checkers.verdict import Fault, Verdict, judged
from holdfast.verify.history import Owed, Promised


def standing(story: Story) -> Verdict:
    """As long as an answer is owed, the newest result that stands is younger than the bound. A
    tentative one stands until another version of its bucket replaces it."""
    faults = []
    for promise in story.promises:
        reader = story.reader(promise)
        for since_us, until_us, age_us in _owed(story, promise):
            faults += _too_old(story, reader, since_us, until_us, age_us)
    return judged("standing", faults)


def newest_age_us(story: Story, reader: Reader, since_us: int, until_us: int) -> int:
    """How old the newest result that stands gets between two instants, since the end of its bucket;
    where there never was one, since the beginning of the run."""
    return max((age for _, _, age in _ages(story, reader, since_us, until_us)), default=0)


def _too_old(
    story: Story, reader: Reader, since_us: int, until_us: int, age_us: int
) -> list[Fault]:
    return [
        Fault(
            max(at, until - age + age_us),
            f"{reader}: the newest result that stands was {age / 1e6:g}s old, and "
            f"{age_us / 1e6:g}s are granted",
        )
        for at, until, age in _ages(story, reader, since_us, until_us)
        if age > age_us
    ]


def _ages(story: Story, reader: Reader, since_us: int, until_us: int) -> list[tuple[int, int, int]]:
    """Between two instants: from and until when each newest result was that, and its age then."""
    if until_us <= since_us:
        return []
    width_us = story.began.width_us
    steps = [(story.began.at, story.began.at // width_us - 1), *reader.newest, (NEVER_US, 0)]
    return [
        (max(at, since_us), min(to, until_us), min(to, until_us) - (bucket + 1) * width_us)
        for (at, bucket), (to, _) in pairwise(steps)
        if to > since_us and at < until_us
    ]


def _owed(story: Story, promise: Promised) -> list[tuple[int, int, int]]:
    """From, to, and how old the newest result may be."""
    mine = [e for e in story.of(Owed) if (e.client, e.output) == (promise.client, promise.output)]
    return [
        (owed.at, story.end_us if after is None else after.at, owed.age_us)
        for owed, after in zip_longest(mine, mine[1:])
        if owed.age_us is not None
    ]
