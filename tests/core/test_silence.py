"""Hosts that are alive and silent: reported, then killed, and nobody else is."""

from __future__ import annotations

from holdfast.core.silence import (
    HUNG_US,
    LISTENING_US,
    SILENT_US,
    STARTING_US,
    Action,
    Gone,
    Heard,
    Kill,
    ReportSilent,
    ReportSpeaks,
    S,
    Silence,
    Started,
    Tick,
)


def ticks(host: Silence, since: int, until: int) -> list[tuple[int, Action]]:
    """One a second; what each brought."""
    return [(at, it) for at in range(since, until + 1, S) for it in host.handle(Tick(at))]


def test_a_host_that_was_heard_of_is_reported_and_then_killed() -> None:
    host = Silence()
    assert host.handle(Started(0)) == [] and ticks(host, 0, 50 * S) == []
    assert host.handle(Heard(50 * S)) == []
    assert ticks(host, 50 * S, 200 * S) == [
        (50 * S + SILENT_US, ReportSilent()),
        (50 * S + HUNG_US, Kill(HUNG_US)),
    ]


def test_a_host_that_speaks_again_is_well() -> None:
    host = Silence()
    host.handle(Started(0))
    host.handle(Heard(S))
    assert ticks(host, S, 20 * S) == [(S + SILENT_US, ReportSilent())] and host.silent
    assert host.handle(Heard(20 * S)) == [ReportSpeaks()] and not host.silent
    assert ticks(host, 20 * S, 25 * S) == []
    assert host.handle(Heard(25 * S)) == []


def test_a_host_that_starts_has_longer() -> None:
    host = Silence()
    host.handle(Started(0))
    assert ticks(host, 0, STARTING_US) == [(STARTING_US, Kill(STARTING_US))]


def test_nothing_is_expected_of_a_process_that_ended() -> None:
    host = Silence()
    host.handle(Started(0))
    host.handle(Heard(S))
    host.handle(Gone())
    assert ticks(host, S, 400 * S) == []
    host.handle(Started(400 * S))
    assert ticks(host, 400 * S, 450 * S) == []


def test_time_in_which_the_supervisor_stood_still_is_no_silence() -> None:
    host = Silence()
    host.handle(Started(0))
    host.handle(Heard(S))
    assert ticks(host, S, 5 * S) == []
    woken = 5 * S + LISTENING_US + 60 * S
    assert host.handle(Tick(woken)) == []
    assert ticks(host, woken + S, woken + HUNG_US)[-1] == (woken + HUNG_US, Kill(HUNG_US))
