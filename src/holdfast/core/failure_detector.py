"""Failure detector: which processes have sent no heartbeat for too long. Pure.

`core.membership` decides what follows: a replica of a pair is declared dead, and a standby takes
over the nodes of a lost host. All times are monotonic.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field

from holdfast.frozen import dataclass

#: Before everything.
_NEVER = -(2**62)


@dataclass(slots=True)
class FailureDetector:
    """Of all processes that send heartbeats."""

    silence_us: int
    #: Taken for the last heartbeat of a process that has sent none.
    since: int
    _heard: dict[str, int] = field(default_factory=dict)
    _ticked: int | None = None
    #: When each dead process was found dead; time in which the controller was suspended is left
    #: out.
    _dead_since: dict[str, int] = field(default_factory=dict)

    def heard(self, name: str, at: int) -> None:
        self._heard[name] = at

    def ended(self, name: str) -> None:
        self._heard[name] = _NEVER

    def speaks(self, name: str, at: int) -> bool:
        return at - self._heard.get(name, _NEVER) < self.silence_us

    def silent(self, name: str, at: int) -> bool:
        return at - self._heard.get(name, self.since) > self.silence_us

    def tick(self, at: int) -> None:
        """After a long pause between two ticks the controller itself was suspended and received
        nothing; the pause does not count as missing heartbeats."""
        if self._ticked is not None and at - self._ticked > self.silence_us // 2:
            self.since = at
            self._heard = {n: h if h == _NEVER else at for n, h in self._heard.items()}
            self._dead_since = dict.fromkeys(self._dead_since, at)
        self._ticked = at

    def found_dead(self, dead: Collection[str], at: int) -> None:
        """All processes that are dead now."""
        self._dead_since = {name: self._dead_since.get(name, at) for name in dead}

    def dead_us(self, at: int) -> dict[str, int]:
        """For how long each dead process has been known to be dead."""
        return {name: at - since for name, since in self._dead_since.items()}

    def outlived(self, name: str, peer: str) -> bool:
        """Whether the peer of a dead process has sent a heartbeat since that death was found."""
        return self._heard.get(peer, _NEVER) > self._dead_since[name]
