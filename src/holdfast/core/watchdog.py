"""Watchdog of a host process: detects that the process exists but hangs. Pure.

A host sends a heartbeat every half second, whatever its nodes are doing. The watchdog reports a
host without heartbeats, and later kills it, so that the supervisor restarts it like one that
crashed. This also covers hosts without a peer replica, which `core.membership` never declares dead.
"""

from __future__ import annotations

from typing import assert_never

from holdfast.frozen import dataclass

S = 1_000_000
#: A host without a heartbeat for this long is reported as unhealthy ...
REPORT_US = 10 * S
#: ... and after this long it is killed and restarted.
KILL_US = 30 * S
#: The same for a process before its first heartbeat: it starts Spark and compiles the network.
STARTING_US = 300 * S
#: After a longer pause between two ticks the supervisor itself was suspended and received nothing;
#: the pause does not count as missing heartbeats.
TICK_US_MAX = 5 * S

# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    at: int


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    at: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process has ended, or was replaced."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Sent repeatedly, more often than `TICK_US_MAX`."""

    at: int


Event = Started | HeartbeatReceived | Stopped | Tick

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportHung:
    pass


@dataclass(frozen=True, slots=True)
class ReportRecovered:
    """Heartbeats arrive again after `ReportHung`."""


@dataclass(frozen=True, slots=True)
class Kill:
    #: Time since the last heartbeat.
    silent_us: int


Action = ReportHung | ReportRecovered | Kill


@dataclass(slots=True)
class Watchdog:
    """Of one host."""

    #: Last heartbeat, or start, of the running process; None: no process runs, or it was killed.
    last_heartbeat: int | None = None
    #: `ReportHung` was the last report.
    hung: bool = False
    _had_heartbeat: bool = False
    _ticked: int | None = None

    @property
    def kill_at(self) -> int | None:
        if self.last_heartbeat is None:
            return None
        return self.last_heartbeat + (KILL_US if self._had_heartbeat else STARTING_US)

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Started():
                self.last_heartbeat, self._had_heartbeat, self.hung = event.at, False, False
            case HeartbeatReceived():
                recovered, self.hung = self.hung, False
                if self.last_heartbeat is not None:
                    self.last_heartbeat, self._had_heartbeat = event.at, True
                return [ReportRecovered()] if recovered else []
            case Stopped():
                self.last_heartbeat, self.hung = None, False
            case Tick():
                return self._tick(event.at)
            case _:
                assert_never(event)
        return []

    def _tick(self, at: int) -> list[Action]:
        suspended = self._ticked is not None and at - self._ticked > TICK_US_MAX
        if suspended and self.last_heartbeat is not None:
            self.last_heartbeat = max(self.last_heartbeat, at)
        self._ticked = at
        if self.last_heartbeat is None or self.kill_at is None:
            return []
        if at >= self.kill_at:
            silent_us = at - self.last_heartbeat
            self.last_heartbeat, self.hung = None, False
            return [Kill(silent_us)]
        if self._had_heartbeat and not self.hung and at - self.last_heartbeat >= REPORT_US:
            self.hung = True
            return [ReportHung()]
        return []
