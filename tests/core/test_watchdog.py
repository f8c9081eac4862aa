"""The watchdog of host processes."""

from __future__ import annotations

from holdfast.core.watchdog import (
    KILL_US,
    REPORT_US,
    STARTING_US,
    TICK_US_MAX,
    Action,
    HeartbeatReceived,
    Kill,
    ReportHung,
    ReportRecovered,
    S,
    Started,
    Stopped,
    Tick,
    Watchdog,
)


def ticks(host: Watchdog, since: int, until: int) -> list[tuple[int, Action]]:
    """One tick per second, and the actions of each tick."""
    return [(at, action) for at in range(since, until + 1, S) for action in host.handle(Tick(at))]


def test_a_host_without_heartbeats_is_reported_and_then_killed() -> None:
    host = Watchdog()
    assert host.handle(Started(0)) == [] and ticks(host, 0, 50 * S) == []
    assert host.handle(HeartbeatReceived(50 * S)) == []
    assert ticks(host, 50 * S, 200 * S) == [
        (50 * S + REPORT_US, ReportHung()),
        (50 * S + KILL_US, Kill(KILL_US)),
    ]


def test_a_host_whose_heartbeats_return_has_recovered() -> None:
    host = Watchdog()
    host.handle(Started(0))
    host.handle(HeartbeatReceived(S))
    assert ticks(host, S, 20 * S) == [(S + REPORT_US, ReportHung())] and host.hung
    assert host.handle(HeartbeatReceived(20 * S)) == [ReportRecovered()] and not host.hung
    assert ticks(host, 20 * S, 25 * S) == []
    assert host.handle(HeartbeatReceived(25 * S)) == []


def test_a_starting_host_has_a_longer_timeout() -> None:
    host = Watchdog()
    host.handle(Started(0))
    assert ticks(host, 0, STARTING_US) == [(STARTING_US, Kill(STARTING_US))]


def test_no_heartbeat_is_expected_from_a_stopped_process() -> None:
    host = Watchdog()
    host.handle(Started(0))
    host.handle(HeartbeatReceived(S))
    host.handle(Stopped())
    assert ticks(host, S, 400 * S) == []
    host.handle(Started(400 * S))
    assert ticks(host, 400 * S, 450 * S) == []


def test_time_in_which_the_supervisor_was_suspended_does_not_count() -> None:
    host = Watchdog()
    host.handle(Started(0))
    host.handle(HeartbeatReceived(S))
    assert ticks(host, S, 5 * S) == []
    woken = 5 * S + TICK_US_MAX + 60 * S
    assert host.handle(Tick(woken)) == []
    assert ticks(host, woken + S, woken + KILL_US)[-1] == (woken + KILL_US, Kill(KILL_US))
