"""One bad part: when it is tried again, when it is quarantined, and when it is well again."""

from __future__ import annotations

import pytest

from holdfast.core.quarantine import (
    LOOP_CRASHES,
    LOOP_US,
    POLICIES,
    STEADY_US,
    Action,
    Asked,
    Condition,
    Ended,
    Event,
    Failed,
    Kind,
    Progressed,
    Quarantine,
    Report,
    S,
    Start,
    Tick,
    kind_of,
    kind_of_exit,
    stopped,
)
from holdfast.errors import (
    HoldfastError,
    IdentityMismatch,
    InputsLost,
    LogCorrupted,
    LogError,
    NotDeterministic,
    ProtocolViolation,
    Refuted,
    SetupError,
    StaleEpoch,
    StorageDenied,
    StorageFull,
    StorageLost,
    TransportError,
    Trimmed,
)


def started(*, rebuildable: bool = False) -> Quarantine:
    part = Quarantine(rebuildable=rebuildable)
    assert part.handle(Tick(0)) == [Start()]
    return part


def condition(actions: list[Action]) -> Condition:
    (report,) = [action for action in actions if isinstance(action, Report)]
    assert report.condition is not None
    return report.condition


def told(part: Quarantine, *events: Event) -> list[Action]:
    actions: list[Action] = []
    for event in events:
        actions = part.handle(event)
    return actions


def fail_again(part: Quarantine, at: int, kind: Kind, reason: str = "why") -> list[Action]:
    """Wait until it is started again, and let it fail at once."""
    assert part.due is not None
    at = max(at, part.due)
    assert isinstance(part.handle(Tick(at))[0], Start)
    return part.handle(Failed(at, kind, reason))


def test_a_read_only_disk_is_tried_again_until_it_can_be_written() -> None:
    part = started()
    found = condition(part.handle(Failed(10 * S, "storage", "read-only")))
    assert (found.quarantined, found.retry_at) == (False, 10 * S + 500_000)
    assert part.handle(Tick(10 * S)) == []
    assert part.handle(Tick(11 * S)) == [Start()]
    assert part.handle(Failed(11 * S, "storage", "read-only")) == [], "the same again is no news"
    assert part.due == 12 * S
    found = condition(fail_again(part, 0, "storage", "read-only"))
    assert found.out and not found.final
    for _ in range(20):
        fail_again(part, 0, "storage", "read-only")
    assert part.due is not None and part.condition is not None
    now = part.due
    assert part.handle(Tick(now)) == [Start()], "however long it lasts"
    told(part, Progressed(now + 1, 100))
    assert part.handle(Progressed(now + 2, 101)) == [Report(None)]


def test_pauses_double_up_to_a_limit() -> None:
    part = started()
    at, pauses = 0, []
    part.handle(Failed(0, "storage", "EIO"))
    for _ in range(8):
        assert part.due is not None
        pauses.append((part.due - at) / S)
        at = part.due
        told(part, Tick(at), Failed(at, "storage", "EIO"))
    assert pauses == [0.5, 1, 2, 4, 5, 5, 5, 5]


def test_a_refused_plan_is_not_tried_again_until_somebody_asks() -> None:
    part = started()
    found = condition(part.handle(Failed(S, "refused", "the state of another query")))
    assert found.out and found.final and found.retry_at is None
    assert "holdfast restart" in found.remedy
    assert part.handle(Tick(10_000 * S)) == []
    assert part.handle(Asked(10_001 * S)) == [Start()]


def test_deleted_storage_is_rebuilt_where_that_is_safe() -> None:
    part = started(rebuildable=True)
    found = condition(part.handle(Failed(S, "damaged", "manifest: damaged at byte 7")))
    assert not found.quarantined and "damaged-N" in found.remedy
    assert part.handle(Tick(2 * S)) == [Start(rebuild=True)]
    told(part, Failed(3 * S, "crash", "something else"))
    assert part.handle(Tick(9 * S)) == [Start(rebuild=False)], "it is moved aside once"


def test_damaged_storage_that_nobody_can_make_anew_is_left_alone() -> None:
    """It is looked at now and then, should somebody have restored it."""
    part = started(rebuildable=False)
    found = condition(part.handle(Failed(S, "damaged", "manifest: damaged at byte 7")))
    assert found.out and "backup" in found.remedy
    assert part.handle(Tick(2 * S)) == []
    assert part.handle(Tick(S + POLICIES["damaged"].most_us)) == [Start(rebuild=False)]


def test_the_same_buckets_again_are_no_progress() -> None:
    """An input is gone: each time the node comes as far as before, and fails at the same bucket."""
    part = started()
    found = None
    for _ in range(POLICIES["inputs"].limit):
        assert part.runs_since is not None
        at = part.runs_since
        told(part, Progressed(at + 1, 100), Progressed(at + 2, 110))
        found = (
            condition(actions)
            if (actions := part.handle(Failed(at + 3, "inputs", "segments/s1/7 is gone")))
            else found
        )
        assert part.due is not None
        part.handle(Tick(part.due))
    assert found is not None and found.out and found.reason == "segments/s1/7 is gone"
    assert part.runs_since is not None
    assert part.handle(Progressed(part.runs_since + 9, 110)) == []
    assert part.handle(Progressed(part.runs_since + 9, 111)) == [Report(None)]


def test_a_crash_is_mended_at_once_and_a_crash_loop_is_called_one() -> None:
    """Progress between them does not hide it: five in five minutes are a loop."""
    part, at = started(), 0
    part.handle(Progressed(0, 0))
    for number in range(1, LOOP_CRASHES):
        at += 20 * S
        part.handle(Progressed(at, number))
        found = condition(part.handle(Failed(at, "crash", "exit code -11")))
        assert not found.quarantined
        assert part.handle(Tick(at + POLICIES["crash"].first_us)) == [Start()]
    found = condition(part.handle(Failed(at + 20 * S, "crash", "exit code -11")))
    assert found.out and found.reason.startswith("crash loop: it ended 5 times within 300 s")
    assert "exit code -11" in found.reason
    assert part.due is not None and part.due - (at + 20 * S) > 10 * POLICIES["crash"].first_us
    at = part.due
    assert part.handle(Tick(at)) == [Start()]
    works = condition(part.handle(Progressed(at + S, 1_000)))
    assert not works.out, "it runs; only its past is reported"
    told(part, Tick(at + LOOP_US), Tick(at + LOOP_US + STEADY_US))
    assert part.condition is None


def test_crashes_without_progress_slow_down_and_are_quarantined() -> None:
    part = started()
    for _ in range(POLICIES["crash"].limit - 1):
        assert part.condition is None or not part.condition.quarantined
        part.handle(Failed(0, "crash", "exit code 1"))
    assert fail_again(part, 0, "crash", "exit code 1")
    assert part.condition is not None and part.condition.out


def test_a_part_that_has_nothing_to_do_is_well_when_it_has_run_for_a_while() -> None:
    part = started()
    told(part, Failed(S, "crash", "exit code 1"), Tick(2 * S))
    assert part.handle(Tick(2 * S + STEADY_US)) == [Report(None)]


def test_whoever_is_asked_to_end_has_not_failed() -> None:
    part = started()
    assert part.handle(Ended(S, again_at=3 * S)) == []
    assert part.handle(Tick(2 * S)) == []
    assert part.handle(Tick(3 * S)) == [Start()]
    assert part.condition is None


@pytest.mark.parametrize(
    ("err", "kind"),
    [
        (TransportError("away"), "transport"),
        (StaleEpoch("replaced"), "transport"),
        (StorageFull("full"), "storage"),
        (StorageDenied("read-only"), "storage"),
        (LogError("EIO"), "storage"),
        (OSError(24, "too many open files"), "storage"),
        (LogCorrupted("rot"), "damaged"),
        (StorageLost("gone"), "damaged"),
        (InputsLost("gone"), "inputs"),
        (Trimmed("gone"), "inputs"),
        (SetupError("no Java"), "setup"),
        (NotDeterministic("rand"), "refused"),
        (HoldfastError("another query"), "refused"),
        (IdentityMismatch("other code"), "refused"),
        (Refuted("other results"), "damaged"),
        (ProtocolViolation("ours"), "crash"),
        (ValueError("anybody's"), "crash"),
    ],
)
def test_the_class_of_an_error_decides(err: BaseException, kind: Kind) -> None:
    assert kind_of(err) == kind


def test_a_process_that_ended_says_with_its_code_why() -> None:
    assert [kind_of_exit(code) for code in (0, 1, 2, 4, -9, -15, -11, 137)] == [
        "transport", "crash", "refused", "storage", "killed", "killed", "crash", "crash",
    ]  # fmt: skip


def test_only_an_output_without_any_replica_stops() -> None:
    needs = {"a": [("first", "first@2"), ("left",)], "b": [("first", "first@2"), ("right",)]}
    assert stopped(needs, {"first"}) == {}
    assert stopped(needs, {"first", "left"}) == {"a": ["left"]}
    assert stopped(needs, {"first", "first@2"}) == {
        "a": ["first", "first@2"], "b": ["first", "first@2"],
    }  # fmt: skip


def test_a_part_that_was_killed_is_well_where_it_was_before() -> None:
    """The cause is not in the buckets; for one that crashed it may be."""
    for kind, well in (("killed", True), ("hung", True), ("crash", False)):
        part = Quarantine()
        part.handle(Tick(0))
        part.handle(Progressed(S, 7))
        part.handle(Failed(2 * S, kind, "ended"))
        part.handle(Progressed(2 * S, 7))
        assert part.condition is not None, "a heartbeat that was under way says nothing"
        part.handle(Tick(3 * S))
        part.handle(Progressed(4 * S, 6))
        assert part.condition is not None
        part.handle(Progressed(5 * S, 7))
        assert (part.condition is None) is well
