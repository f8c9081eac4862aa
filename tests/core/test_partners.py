"""Replicas use each other while one corrects itself (Borealis section 3.4.3), as transcripts."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.consistency import ASK_AGAIN_US, together
from holdfast.core.moves import (
    Answered,
    Ask,
    BoundaryArrived,
    End,
    Leave,
    Postponed,
    Run,
    RunTentative,
    Tick,
    Wake,
)
from holdfast.core.progress import Progress
from tests.core.transcripts import (
    PROCESS,
    STABILIZATION,
    came,
    done,
    failed,
    guessed,
    plan_of,
    said,
)

WITH_PARTNER = replace(PROCESS, stabilization="process", partners=("p.2",))


def test_3_4_3_before_reconciling_a_node_asks_another_replica_to_postpone() -> None:
    core = failed(WITH_PARTNER)
    assert said(core, came(1_200, "s2", 5)) == [Ask("p")]
    assert said(core, Tick(1_250)) == []  # asked once
    assert said(core, Answered(1_300, "p", "postponed")) == [STABILIZATION, Run("p", 5, 5)]


def test_3_4_3_while_the_partner_answers_new_buckets_wait_here() -> None:
    core = failed(WITH_PARTNER)
    said(core, came(1_200, "s2", 5), Answered(1_300, "p", "postponed"))
    assert said(core, came(1_400, "s1", 6), came(1_400, "s2", 6), Tick(9_999)) == []
    assert said(core, done(10_000, 5)) == [Leave("p"), Run("p", 6, 6)]


def test_3_4_3_a_replica_that_is_alone_runs_both_versions_itself() -> None:
    core = failed(WITH_PARTNER)
    said(core, came(1_200, "s2", 5))
    assert said(core, Answered(1_300, "p", "alone")) == [STABILIZATION, Run("p", 5, 5)]
    said(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert said(core, Tick(2_400)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ())]


def test_3_4_3_refused_it_goes_on_as_tentative_and_asks_again() -> None:
    core = failed(WITH_PARTNER)
    said(core, came(1_200, "s2", 5))
    assert said(core, Answered(1_300, "p", "refused")) == [Wake(1_300 + ASK_AGAIN_US)]
    assert said(core, came(1_350, "s1", 6)) == [Ask("p"), Wake(2_350)]
    said(core, Answered(1_400, "p", "refused"))
    assert said(core, Tick(2_350)) == [
        Ask("p"),
        RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",)),
    ]
    said(core, Answered(2_360, "p", "refused"))
    # Now bucket 6 has to be corrected, too.
    assert said(core, guessed(2_370, 6)) == []
    assert said(core, came(2_400, "s2", 6)) == [Ask("p")]
    assert said(core, Answered(2_500, "p", "postponed")) == [STABILIZATION, Run("p", 5, 6)]


def test_3_4_3_leave_that_came_too_late_to_be_used_is_asked_for_again() -> None:
    """The partner looks whether this one corrects itself, finds that it does not, and may be gone
    when it does."""
    core = failed(WITH_PARTNER)
    said(core, came(1_200, "s2", 5), came(1_250, "s1", 6), Tick(2_250), guessed(2_260, 6))
    assert said(core, Answered(2_300, "p", "postponed")) == []  # bucket 6 is not whole
    assert not core.paths["p"].consistency.correcting
    assert said(core, came(2_900, "s2", 6)) == [Ask("p")]


def test_3_4_3_refused_it_asks_again_also_when_nothing_more_comes() -> None:
    """The partner is done after a while, and says so to nobody: it did not ask this one."""
    core = failed(WITH_PARTNER)
    for stream in ("s1", "s2"):
        asked = said(core, BoundaryArrived(1_200, stream, 5, ended=True))
    assert asked == [Ask("p")]
    assert said(core, Answered(1_300, "p", "refused")) == [Wake(1_300 + ASK_AGAIN_US)]
    assert said(core, Tick(1_300 + ASK_AGAIN_US)) == [Ask("p")]


def test_3_4_3_who_suspends_new_buckets_anyway_asks_nobody() -> None:
    core = failed(replace(WITH_PARTNER, stabilization="suspend"))
    assert said(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 5, 5)]


def test_3_4_3_a_node_that_was_asked_to_postpone_goes_on_as_tentative() -> None:
    core = failed(WITH_PARTNER)
    assert core.paths["p"].consistency.asked_by("p.2", "p.1") == "postponed"
    assert said(core, came(1_200, "s2", 5)) == []  # all is corrected, but its turn comes later
    said(core, came(1_300, "s1", 6))
    assert said(core, came(1_300, "s2", 6)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ())]
    said(core, guessed(1_310, 6))
    assert said(core, Postponed(1_400, "p", None)) == [Ask("p")]


def test_3_4_3_where_both_want_to_correct_themselves_the_first_by_name_goes_first() -> None:
    one, two = failed(WITH_PARTNER), failed(WITH_PARTNER)
    for core in (one, two):
        assert said(core, came(1_200, "s2", 5)) == [Ask("p")]
    assert one.paths["p"].consistency.asked_by("p.2", me="p.1") == "refused"
    assert two.paths["p"].consistency.asked_by("p.1", me="p.2") == "postponed"
    assert said(one, Answered(1_300, "p", "postponed"))[0] == STABILIZATION
    said(two, Answered(1_300, "p", "refused"))
    assert said(two, Tick(1_400)) == []  # postponed
    assert one.paths["p"].consistency.correcting
    said(one, done(1_500, 5))
    assert not one.paths["p"].consistency.correcting
    assert said(two, Postponed(1_600, "p", None)) == [Ask("p")]


def test_who_corrects_itself_refuses_and_who_only_catches_up_is_no_help() -> None:
    core = failed(WITH_PARTNER)
    said(core, came(1_200, "s2", 5), Answered(1_300, "p", "alone"))
    assert core.paths["p"].consistency.asked_by("p.2", "p.1") == "refused"
    started = Progress([plan_of(WITH_PARTNER)])
    assert started.paths["p"].consistency.asked_by("p.2", "p.1") == "alone"


def test_one_partner_that_goes_on_answering_is_enough() -> None:
    assert together(["refused", "postponed", "alone"]) == "postponed"
    assert together(["alone", "refused"]) == "refused"
    assert together(["alone", "alone"]) == "alone"
    assert together([]) == "alone"


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    core = failed(WITH_PARTNER)
    said(core, came(1_200, "s2", 5), Answered(1_300, "p", "alone"))
    assert said(core, Answered(1_400, "p", "postponed")) == []
    assert core.paths["p"].consistency.mode == "process"


def test_a_path_that_has_ended_asks_and_gives_nothing_more() -> None:
    core = failed(WITH_PARTNER)
    for stream in ("s1", "s2"):
        asked = said(core, BoundaryArrived(1_200, stream, 5, ended=True))
    assert asked == [Ask("p")]
    said(core, Answered(1_300, "p", "alone"))
    assert said(core, done(1_400, 5)) == [Leave("p"), End("p")]
    assert said(core, Answered(1_500, "p", "refused"), Postponed(1_600, "p", None)) == []
