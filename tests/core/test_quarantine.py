"""When a failed component is restarted, when it is quarantined, and when it is healthy again."""

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
    component = Quarantine(rebuildable=rebuildable)
    assert component.handle(Tick(0)) == [Start()]
    return component


def condition(actions: list[Action]) -> Condition:
    (report,) = [action for action in actions if isinstance(action, Report)]
    assert report.condition is not None
    return report.condition


def handle(component: Quarantine, *events: Event) -> list[Action]:
    actions: list[Action] = []
    for event in events:
        actions = component.handle(event)
    return actions


def fail_again(component: Quarantine, at: int, kind: Kind, reason: str = "why") -> list[Action]:
    """Wait until the component is restarted, and let it fail at once."""
    assert component.due is not None
    at = max(at, component.due)
    assert isinstance(component.handle(Tick(at))[0], Start)
    return component.handle(Failed(at, kind, reason))


def test_a_component_with_a_read_only_disk_is_restarted_until_it_makes_progress() -> None:
    component = started()
    state = condition(component.handle(Failed(10 * S, "storage", "read-only")))
    assert (state.quarantined, state.retry_at) == (False, 10 * S + 500_000)
    text = state.status(10 * S, "h1").text
    assert text.startswith("restarting (next restart in 0 s): read-only. Remedy: restarts auto")
    assert component.handle(Tick(10 * S)) == []
    assert component.handle(Tick(11 * S)) == [Start()]
    assert component.handle(Failed(11 * S, "storage", "read-only")) == [], (
        "the same failure is reported once"
    )
    assert component.due == 12 * S
    state = condition(fail_again(component, 0, "storage", "read-only"))
    assert state.out and not state.final
    for _ in range(20):
        fail_again(component, 0, "storage", "read-only")
    assert component.due is not None and component.condition is not None
    now = component.due
    assert component.handle(Tick(now)) == [Start()], "restarts never stop"
    handle(component, Progressed(now + 1, 100))
    assert component.handle(Progressed(now + 2, 101)) == [Report(None)]


def test_the_pause_before_a_restart_doubles_up_to_a_limit() -> None:
    component = started()
    at, pauses = 0, []
    component.handle(Failed(0, "storage", "EIO"))
    for _ in range(8):
        assert component.due is not None
        pauses.append((component.due - at) / S)
        at = component.due
        handle(component, Tick(at), Failed(at, "storage", "EIO"))
    assert pauses == [0.5, 1, 2, 4, 5, 5, 5, 5]


def test_a_refused_plan_is_restarted_only_on_request() -> None:
    component = started()
    state = condition(component.handle(Failed(S, "refused", "the state of another query")))
    assert state.out and state.final and state.retry_at is None
    assert "`holdfast restart --host h1`" in state.status(S, "h1").text
    assert component.handle(Tick(10_000 * S)) == []
    assert component.handle(Asked(10_001 * S)) == [Start()]


def test_damaged_storage_is_rebuilt_if_that_is_safe() -> None:
    component = started(rebuildable=True)
    state = condition(component.handle(Failed(S, "damaged", "manifest: damaged at byte 7")))
    assert not state.quarantined and "damaged-N" in state.remedy
    assert component.handle(Tick(2 * S)) == [Start(rebuild=True)]
    handle(component, Failed(3 * S, "crash", "something else"))
    assert component.handle(Tick(9 * S)) == [Start(rebuild=False)], (
        "the storage is moved aside once"
    )


def test_damaged_storage_that_cannot_be_rebuilt_is_not_touched() -> None:
    """The component is still restarted with long pauses: the storage may have been restored."""
    component = started(rebuildable=False)
    state = condition(component.handle(Failed(S, "damaged", "manifest: damaged at byte 7")))
    assert state.out and "backup" in state.remedy
    assert component.handle(Tick(2 * S)) == []
    assert component.handle(Tick(S + POLICIES["damaged"].most_us)) == [Start(rebuild=False)]


def test_computing_the_same_buckets_again_is_no_progress() -> None:
    """An input was deleted: at each restart the node fails at the same bucket."""
    component = started()
    state = None
    for _ in range(POLICIES["inputs"].limit):
        assert component.runs_since is not None
        at = component.runs_since
        handle(component, Progressed(at + 1, 100), Progressed(at + 2, 110))
        state = (
            condition(actions)
            if (actions := component.handle(Failed(at + 3, "inputs", "segments/s1/7 is gone")))
            else state
        )
        assert component.due is not None
        component.handle(Tick(component.due))
    assert state is not None and state.out and state.reason == "segments/s1/7 is gone"
    assert component.runs_since is not None
    assert component.handle(Progressed(component.runs_since + 9, 110)) == []
    assert component.handle(Progressed(component.runs_since + 9, 111)) == [Report(None)]


def test_a_crash_is_followed_by_a_restart_and_a_crash_loop_by_quarantine() -> None:
    """Five crashes in five minutes are a crash loop, even with progress between them."""
    component, at = started(), 0
    component.handle(Progressed(0, 0))
    for number in range(1, LOOP_CRASHES):
        at += 20 * S
        component.handle(Progressed(at, number))
        state = condition(component.handle(Failed(at, "crash", "exit code -11")))
        assert not state.quarantined
        assert component.handle(Tick(at + POLICIES["crash"].first_us)) == [Start()]
    state = condition(component.handle(Failed(at + 20 * S, "crash", "exit code -11")))
    assert state.out and state.reason.startswith("crash loop: 5 failures within 300 s")
    assert "exit code -11" in state.reason
    assert (
        component.due is not None
        and component.due - (at + 20 * S) > 10 * POLICIES["crash"].first_us
    )
    at = component.due
    assert component.handle(Tick(at)) == [Start()]
    works = condition(component.handle(Progressed(at + S, 1_000)))
    assert not works.out, "the component runs; only its earlier crashes are reported"
    handle(component, Tick(at + LOOP_US), Tick(at + LOOP_US + STEADY_US))
    assert component.condition is None


def test_crashes_without_progress_lead_to_longer_pauses_and_quarantine() -> None:
    component = started()
    for _ in range(POLICIES["crash"].limit - 1):
        assert component.condition is None or not component.condition.quarantined
        component.handle(Failed(0, "crash", "exit code 1"))
    assert fail_again(component, 0, "crash", "exit code 1")
    assert component.condition is not None and component.condition.out


def test_an_idle_component_is_healthy_after_it_has_run_for_a_while() -> None:
    component = started()
    handle(component, Failed(S, "crash", "exit code 1"), Tick(2 * S))
    assert component.handle(Tick(2 * S + STEADY_US)) == [Report(None)]


def test_a_requested_stop_is_not_a_failure() -> None:
    component = started()
    assert component.handle(Ended(S, again_at=3 * S)) == []
    assert component.handle(Tick(2 * S)) == []
    assert component.handle(Tick(3 * S)) == [Start()]
    assert component.condition is None


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
        (Trimmed("an older copy of the storage"), "damaged"),
        (SetupError("no Java"), "setup"),
        (NotDeterministic("rand"), "refused"),
        (HoldfastError("another query"), "refused"),
        (IdentityMismatch("other code"), "refused"),
        (Refuted("other results"), "damaged"),
        (ProtocolViolation("ours"), "crash"),
        (ValueError("anybody's"), "crash"),
    ],
)
def test_the_class_of_an_error_determines_its_kind(err: BaseException, kind: Kind) -> None:
    assert kind_of(err) == kind


def test_the_exit_code_of_a_process_determines_the_kind() -> None:
    assert [kind_of_exit(code) for code in (0, 1, 2, 4, -9, -15, -11, 137)] == [
        "transport", "crash", "refused", "storage", "killed", "killed", "crash", "crash",
    ]  # fmt: skip


def test_an_output_stops_only_if_all_replicas_of_a_fragment_are_out() -> None:
    needs = {"a": [("first", "first@2"), ("left",)], "b": [("first", "first@2"), ("right",)]}
    assert stopped(needs, {"first"}) == {}
    assert stopped(needs, {"first", "left"}) == {"a": ["left"]}
    assert stopped(needs, {"first", "first@2"}) == {
        "a": ["first", "first@2"], "b": ["first", "first@2"],
    }  # fmt: skip


def test_a_killed_component_is_healthy_when_it_reaches_its_former_bucket() -> None:
    """A bucket cannot be the cause of a kill, but it may be the cause of a crash."""
    for kind, healthy in (("killed", True), ("hung", True), ("crash", False)):
        component = Quarantine()
        component.handle(Tick(0))
        component.handle(Progressed(S, 7))
        component.handle(Failed(2 * S, kind, "ended"))
        component.handle(Progressed(2 * S, 7))
        assert component.condition is not None, "a heartbeat from before the failure proves nothing"
        component.handle(Tick(3 * S))
        component.handle(Progressed(4 * S, 6))
        assert component.condition is not None
        component.handle(Progressed(5 * S, 7))
        assert (component.condition is None) is healthy
