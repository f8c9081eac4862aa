"""Checkers: did a run keep its promises? Each checker answers one question from the history alone,
so that the simulator and chaos on real processes are judged by the same rules.

    lost       every row is delivered                delay     in time while nothing is broken
    doubled    no row is delivered too often         bounded   buffers are small without faults
    wrong      no incorrect row is delivered         converge  replicas produce the same rows
    undone     stable rows never change              accepted  sources keep accepted rows
    corrected  tentative rows become stable          alive     no process stops without need
    order      bucket numbers increase               contract  the levels of ECOC section 2.5
    available  results continue during failures      reported  broken promises are reported
    standing   the newest valid result is recent     labelled  tentative rows list missing inputs
    promises   one replica always answers            detected  unusable producers are soon left
    held       buffers grow linearly at most         paired    a lost replica is soon rebuilt
    closing    buckets close despite clock steps
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
from holdfast.verify.checkers.verdict import Outcome, Verdict, verdict_table, write_json
from holdfast.verify.history import History, Reported

__all__ = ["CHECKERS", "Outcome", "Verdict", "check", "verdict_table", "write_json"]

Checker = Callable[[Story], Verdict]
#: Verdicts are returned in this order.
CHECKERS: tuple[Checker, ...] = (
    lost, doubled, wrong, undone, corrected, order, labelled, delay, available, standing,
    promises, detected, bounded, held, paired, closing, converge, accepted, alive, contract,
    reported,
)  # fmt: skip


def check(history: History, *, monitored: bool = False) -> list[Verdict]:
    """All verdicts. The `reported` checker runs only if a monitor ran: `monitored` is set, or the
    history holds a report."""
    story = Story(history)
    if not monitored and not story.of(Reported):
        unjudged = Verdict("reported", "unknown", "the history holds no report of a monitor")
        return [*(_ask(one, story) for one in CHECKERS if one is not reported), unjudged]
    return [_ask(one, story) for one in CHECKERS]


def _ask(checker: Checker, story: Story) -> Verdict:
    """Runs one checker. A checker that raises an exception counts as failed, so that a broken
    checker is never mistaken for a passed one."""
    try:
        return checker(story)
    except Exception as err:
        why = f"the checker itself failed: {type(err).__name__}: {err}"
        return Verdict(checker.__name__, "failed", why)
