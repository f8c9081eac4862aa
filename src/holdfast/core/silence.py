"""Whether the process of a host hangs: it exists, and sends no heartbeats. Pure.

A host sends heartbeats every half second, whatever its nodes are doing. One that has been silent
for long is reported, and after a longer time killed and started again, like one that crashed: also
where no peer replica could have it declared dead (`core.membership`). The supervisor drives it.
"""

from __future__ import annotations

from typing import assert_never

from holdfast.frozen import dataclass

S = 1_000_000
#: A host that has sent no heartbeat for so long is reported as unhealthy ...
SILENT_US = 10 * S
#: ... and after so long killed and started again.
HUNG_US = 30 * S
#: The same for a process that has not sent its first heartbeat: it starts Spark and compiles.
STARTING_US = 300 * S
#: Where more time has passed since the last tick, nobody listened; that does not count as silence.
LISTENING_US = 5 * S

# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    at: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat of the process."""

    at: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The process has ended, or was replaced."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Given again and again, more often than `LISTENING_US`."""

    at: int


Event = Started | Heard | Gone | Tick

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportSilent:
    pass


@dataclass(frozen=True, slots=True)
class ReportSpeaks:
    """It was reported as silent, and is not any more."""


@dataclass(frozen=True, slots=True)
class Kill:
    silent_us: int


Action = ReportSilent | ReportSpeaks | Kill


@dataclass(slots=True)
class Silence:
    """Of one host."""

    #: Since when nothing was heard of the process that runs; None: none does, or it was killed.
    since: int | None = None
    #: It was reported.
    silent: bool = False
    _has_spoken: bool = False
    _ticked: int | None = None

    @property
    def kill_at(self) -> int | None:
        if self.since is None:
            return None
        return self.since + (HUNG_US if self._has_spoken else STARTING_US)

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Started():
                self.since, self._has_spoken, self.silent = event.at, False, False
            case Heard():
                spoke_again, self.silent = self.silent, False
                if self.since is not None:
                    self.since, self._has_spoken = event.at, True
                return [ReportSpeaks()] if spoke_again else []
            case Gone():
                self.since, self.silent = None, False
            case Tick():
                return self._tick(event.at)
            case _:
                assert_never(event)
        return []

    def _tick(self, at: int) -> list[Action]:
        if self._ticked is not None and at - self._ticked > LISTENING_US and self.since is not None:
            self.since = max(self.since, at)
        self._ticked = at
        if self.since is None or self.kill_at is None:
            return []
        if at >= self.kill_at:
            silent_us, self.since, self.silent = at - self.since, None, False
            return [Kill(silent_us)]
        if self._has_spoken and not self.silent and at - self.since >= SILENT_US:
            self.silent = True
            return [ReportSilent()]
        return []
