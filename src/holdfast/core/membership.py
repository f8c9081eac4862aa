"""Who is alive, and who takes whose place (Flux sections 2.2, 3.2 and 5.4). Pure.

The controller hears of everybody and keeps what is decided here; what is durable (who registered,
who is dead, who runs where) is given in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

#: Before anything.
_NEVER = -(2**62)


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of the instances of a name."""

    #: Of the newest that registered.
    epoch: int
    #: Those up to this one are dead.
    dead: int

    @property
    def gone(self) -> bool:
        """The newest is dead, and has no successor yet."""
        return self.dead >= self.epoch > 0

    @property
    def lives(self) -> bool:
        return self.epoch > self.dead


def dead_of(standings: Mapping[str, Standing]) -> dict[str, int]:
    """Who is gone, and up to which epoch."""
    return {name: known.dead for name, known in standings.items() if known.gone}


@dataclass(slots=True)
class Hearing:
    """Who was heard of when."""

    #: Of whom nothing was heard, since when that would have been.
    since: int
    _heard: dict[str, int] = field(default_factory=dict)
    _listened: int | None = None

    def heard(self, name: str, at: int) -> None:
        self._heard[name] = at

    def ended(self, name: str) -> None:
        """It is known to be gone: there is no need to wait for its silence."""
        self._heard[name] = _NEVER

    def speaks(self, name: str, at: int, silence_us: int) -> bool:
        return at - self._heard.get(name, _NEVER) < silence_us

    def silent(self, name: str, at: int, silence_us: int) -> bool:
        return at - self._heard.get(name, self.since) > silence_us

    def listened(self, at: int, silence_us: int) -> None:
        """Said again and again. Time in which nobody listened does not count as silence."""
        if self._listened is not None and at - self._listened > silence_us // 2:
            self.since = at
            self._heard = {n: h if h == _NEVER else at for n, h in self._heard.items()}
        self._listened = at


def lost(
    partners: Mapping[str, str],
    standings: Mapping[str, Standing],
    hearing: Hearing,
    at: int,
    silence_us: int,
) -> list[str]:
    """Who is dead now: has not been heard of for so long, while its partner lives and speaks. If
    nobody does, it is the listener that was cut off; so never both of a pair."""
    found: list[str] = []
    for name, partner in partners.items():
        alive = standings[partner].lives and partner not in found
        if (
            standings[name].lives
            and alive
            and hearing.silent(name, at, silence_us)
            and hearing.speaks(partner, at, silence_us)
        ):
            found.append(name)
    return found


def stand_ins(
    runs: Mapping[str, Sequence[str]], gone: Collection[str], speaks: Callable[[str], bool]
) -> dict[str, str]:
    """Where nodes go that are `gone` with their host: all of a host to the same one, which speaks
    and runs nothing, so that copies cannot meet there."""
    moved: dict[str, str] = {}
    free = [host for host, names in runs.items() if not names and speaks(host)]
    for host, names in runs.items():
        lost_here = [name for name in names if name in gone]
        if lost_here and free and not speaks(host):
            moved |= dict.fromkeys(lost_here, free.pop(0))
    return moved
