"""Did a run keep what it promised? A score of questions, answered from nothing but the history of
the run, so that the simulator and chaos on real processes are held to the same.

    lost       every row arrives                     delay     in time while nothing is broken
    doubled    none too often                        bounded   buffers stay small, too
    wrong      none that should not                  converge  replicas make the same
    undone     stable is for ever                    accepted  sources keep what they took
    corrected  tentative is not                      alive     nobody stops without need
    order      buckets rise                          contract  the levels of ECOC section 2.5
    available  something, while anything is          reported  broken promises are noticed
    standing   a recent result stands                labelled  tentative says what it lacks
    promises   somebody answers                      detected  the useless are soon left
    held       buffers grow with time at most        paired    a pair is soon one again
    closing    whatever clocks do, buckets close
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.verify.checkers.delivered import (
    contract,
    corrected,
    doubled,
    lost,
    order,
    undone,
    wrong,
)
from holdfast.verify.checkers.freshness import standing
from holdfast.verify.checkers.internal import accepted, alive, converge, held
from holdfast.verify.checkers.replicas import detected, promises
from holdfast.verify.checkers.story import Story
from holdfast.verify.checkers.timing import (
    available,
    bounded,
    closing,
    delay,
    labelled,
    paired,
    reported,
)
from holdfast.verify.checkers.verdict import Outcome, Verdict, verdict_table, write_verdicts
from holdfast.verify.history import History, Reported

__all__ = ["CHECKERS", "Outcome", "Verdict", "check", "verdict_table", "write_verdicts"]

Checker = Callable[[Story], Verdict]
#: In the order of the verdicts.
CHECKERS: tuple[Checker, ...] = (
    lost, doubled, wrong, undone, corrected, order, labelled, delay, available, standing,
    promises, detected, bounded, held, paired, closing, converge, accepted, alive, contract,
    reported,
)  # fmt: skip


def check(history: History, *, monitored: bool = False) -> list[Verdict]:
    """All verdicts. Whether broken promises were reported is asked only where a monitor ran: it is
    `monitored`, or was heard."""
    story = Story(history)
    if not monitored and not story.of(Reported):
        silent = Verdict("reported", "unknown", "no monitor was heard")
        return [*(_ask(one, story) for one in CHECKERS if one is not reported), silent]
    return [_ask(one, story) for one in CHECKERS]


def _ask(checker: Checker, story: Story) -> Verdict:
    """A checker that breaks must not look like one that has nothing to say."""
    try:
        return checker(story)
    except Exception as err:
        why = f"the checker itself failed: {type(err).__name__}: {err}"
        return Verdict(checker.__name__, "failed", why)
