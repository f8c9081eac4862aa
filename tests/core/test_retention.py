"""What is kept for the copies of a pair: one disk is enough, whichever it is (Flux section 3.2.2).

The pair is two real `Progress` machines behind one producer that keeps to `core.retention`. Chance
decides who crashes, whose disk is lost, what is declared, heard and acknowledged when. One disk may
be lost at a time: the next one only when the pair has two again that count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from holdfast.core import progress_events as core
from holdfast.core.catch_up_events import LEASE_US
from holdfast.core.membership import Standing
from holdfast.core.progress import Progress
from holdfast.core.retention import Position, position_of_gone
from holdfast.core.sunion import FOREVER

PLAN = core.PathPlan("out", ("s",), ("out",), convergent=False, extent=2)
NAMES = ("a", "a@2")


# -- the rule -------------------------------------------------------------------------------------


LAST = Position(9, 4, 2)


def test_a_copy_that_lives_speaks_for_itself() -> None:
    assert position_of_gone(Standing(2, 1), LAST, 1, None, 0) is None


def test_3_2_2_a_dead_copy_is_not_waited_for_but_its_disk_is_reckoned_with() -> None:
    found = position_of_gone(Standing(2, 2), LAST, 1, None, 0)
    assert found == Position(FOREVER, 4, 2)
    assert position_of_gone(Standing(2, 2), found, 1, None, 0) is None, "it is said once"


def test_a_dead_copy_that_never_spoke_here_needs_what_there_is() -> None:
    found = position_of_gone(Standing(2, 2), Position(-1, -1, 0), 3, None, 0)
    assert found == Position(FOREVER, 3, 2)


def test_3_2_2_ack_all_once_the_disk_is_released() -> None:
    found = position_of_gone(Standing(2, 2, 2), LAST, 1, None, 0)
    assert found == Position(FOREVER, FOREVER, 2)


def test_that_an_earlier_life_was_released_means_nothing() -> None:
    assert position_of_gone(Standing(2, 2, 1), LAST, 1, None, 0) == Position(FOREVER, 4, 2)


def test_5_3_2_a_successor_that_holds_is_kept_for_while_it_speaks_up() -> None:
    holds, at = Position(4, 4, 3), 5 * LEASE_US
    for standing, held_at in (
        (Standing(2, 2), 0),
        (Standing(2, 2, 2), at - LEASE_US),
        (Standing(2, 2, 2), None),
    ):
        assert position_of_gone(standing, holds, 4, held_at, at) is None
    gone = position_of_gone(Standing(2, 2, 2), holds, 4, at - LEASE_US - 1, at)
    assert gone == Position(FOREVER, FOREVER, 3)


# -- one disk is enough ---------------------------------------------------------------------------


@dataclass
class Disk:
    """What survives a crash: a checkpoint with what it needs of its inputs, and results."""

    version: tuple[int, int] | None = None
    #: The first bucket of the results that is still there.
    kept_from: int = 0


@dataclass
class Copy:
    name: str
    epoch: int = 1
    memory: Progress | None = None
    disk: Disk = field(default_factory=Disk)
    #: The pair reckons with this disk.
    counts: bool = True
    #: It holds, and has not come up yet.
    catching_up: bool = False
    unsaid: list[Position] = field(default_factory=list)
    #: Checkpoints that are on the disk and of which the node has not heard.
    saved: list[core.CheckpointDone] = field(default_factory=list)


class Pair:
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.closed_upto = -1
        self.trimmed_upto = -1
        self.positions: dict[str, Position] = {}
        #: The client's position.
        self.acknowledged = -1
        self.standings = {name: Standing(1, 0) for name in NAMES}
        self.copies = {name: Copy(name) for name in NAMES}
        for copy in self.copies.values():
            self._come_up(copy, None)

    # -- the world --------------------------------------------------------------------------------

    def close(self, name: str) -> None:
        self.closed_upto += self._chance.randint(1, 7)
        for copy in self.copies.values():
            self._tell(copy, core.BoundaryArrived(0, "s", self.closed_upto))

    def work(self, name: str) -> None:
        """A step; its checkpoint, if there is one, may not be heard of, and acknowledgements may
        still be on their way."""
        copy, said = self.copies[name], self._chance.randint(0, 9)
        if copy.memory is not None and (hi := copy.memory.paths["out"].running_upto) is not None:
            needs_from = max(0, hi + 1 - self._chance.randint(0, 2))
            self._tell(copy, core.StepDone(0, "out", hi, needs_from, hi))
        while copy.saved and self._chance.random() < 0.8:
            self._tell(copy, copy.saved.pop(0))
        for position in copy.unsaid[:said]:
            self._take(name, position)
        copy.unsaid = copy.unsaid[said:]

    def read_results(self, name: str) -> None:
        """The client takes what one copy has, and tells those that live."""
        memory = self.copies[name].memory
        if memory is not None and (position := memory.paths["out"].position) is not None:
            self.acknowledged = max(self.acknowledged, position)
            for copy in self.copies.values():
                if copy.memory is not None:
                    copy.disk.kept_from = max(copy.disk.kept_from, self.acknowledged + 1)

    def crash(self, name: str) -> None:
        copy = self.copies[name]
        copy.memory, copy.catching_up, copy.unsaid, copy.saved = None, False, [], []

    def lose_disk(self, name: str) -> None:
        if all(copy.counts for copy in self.copies.values()):
            self.crash(name)
            copy = self.copies[name]
            copy.disk, copy.counts = Disk(kept_from=FOREVER), False

    # -- the controller ---------------------------------------------------------------------------

    def declare_dead(self, name: str) -> None:
        """It may be wrong: the copy may live."""
        other = self._other(name)
        if self.standings[other.name].lives and self.standings[name].lives and other.memory:
            known = self.standings[name]
            self.standings[name] = Standing(known.epoch, known.epoch, known.released)
            self._tell(other, core.Unpaired(0, True))

    def release(self, name: str) -> None:
        known, other = self.standings[name], self._other(name)
        if known.gone and self.standings[other.name].lives and other.memory and other.counts:
            self.standings[name] = Standing(known.epoch, known.dead, known.dead)
            self.copies[name].counts = False

    def producer_hears(self, _: str) -> None:
        for name, standing in self.standings.items():
            found = position_of_gone(
                standing, self.positions[name], self.trimmed_upto, held_at=0, at=0
            )
            if found is not None:
                self._take(name, found)

    # -- coming back ------------------------------------------------------------------------------

    def start_again(self, name: str) -> None:
        """A new instance holds before it does anything else."""
        copy = self.copies[name]
        if copy.memory is None:
            copy.epoch += 1
            copy.catching_up = True
            self._take(name, Position(self.trimmed_upto, self.trimmed_upto, copy.epoch))

    def catch_up(self, name: str) -> None:
        copy, other = self.copies[name], self._other(name)
        if not copy.catching_up:
            return
        peer = other.memory.paths["out"] if other.memory is not None else None
        if peer is not None and peer.position is not None:
            copy.disk = Disk((peer.position, peer.needs_from), other.disk.kept_from)
            self._come_up(copy, copy.disk.version)
        elif copy.counts and other.memory is None:
            self._come_up(copy, copy.disk.version)

    # -- what must hold ---------------------------------------------------------------------------

    def each_disk_that_counts_is_enough(self, seed: int) -> None:
        for copy in self.copies.values():
            if not copy.counts:
                continue
            needs_from = 0 if copy.disk.version is None else copy.disk.version[1]
            assert self.trimmed_upto < needs_from, f"seed {seed}: {copy.name} cannot come back"
            assert copy.disk.kept_from <= self.acknowledged + 1

    def there_is_always_one(self) -> None:
        assert any(copy.counts for copy in self.copies.values())

    # -- inside -----------------------------------------------------------------------------------

    def _other(self, name: str) -> Copy:
        return self.copies[NAMES[1 - NAMES.index(name)]]

    def _come_up(self, copy: Copy, version: tuple[int, int] | None) -> None:
        resumed = None if version is None else {"out": (*version, 0)}
        copy.memory = Progress(
            [PLAN], recovery="pairs", resumed=resumed, checkpoint_buckets=3, group_buckets_max=4
        )
        copy.catching_up, copy.counts = False, True
        self.positions.setdefault(copy.name, Position(-1, -1, 0))
        known = self.standings[copy.name]
        self.standings[copy.name] = Standing(copy.epoch, known.dead, known.released)
        for one in (copy, self._other(copy.name)):
            gone = self.standings[self._other(one.name).name].gone
            self._tell(one, core.Unpaired(0, gone))
        self._tell(copy, core.Began(0))
        self._tell(copy, core.InputOpened(0, "s", 0, self.trimmed_upto))
        self._tell(copy, core.BoundaryArrived(0, "s", self.closed_upto))

    def _tell(self, copy: Copy, event: core.Event) -> None:
        if copy.memory is None:
            return
        for action in copy.memory.handle(event):
            match action:
                case core.Checkpoint():
                    path = copy.memory.paths["out"]
                    copy.disk.version = (action.bucket, path.needs_from)
                    copy.saved.append(core.CheckpointDone(0, "out", action.bucket, path.needs_from))
                case core.Acknowledge():
                    said = Position(action.received, action.no_longer_needed, copy.epoch)
                    copy.unsaid.append(said)
                case core.Fail():
                    raise AssertionError(action.why)

    def _take(self, name: str, said: Position) -> None:
        """As a log does: an older instance is not heard, and positions of one never fall."""
        last = self.positions[name]
        if said.epoch < last.epoch:
            return
        if said.epoch == last.epoch:
            said = Position(
                max(said.received, last.received), max(said.needed, last.needed), said.epoch
            )
        self.positions[name] = said
        if all(position.epoch for position in self.positions.values()):
            needed = min(position.needed for position in self.positions.values())
            self.trimmed_upto = max(self.trimmed_upto, min(needed, self.closed_upto))


def test_one_disk_of_a_pair_is_enough_whichever_it_is() -> None:
    """At any time each disk that counts, with what the producer keeps, rebuilds everything that is
    not acknowledged downstream."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        pair = Pair(chance := Random(seed))
        rules = [
            pair.close, pair.work, pair.work, pair.work, pair.read_results, pair.crash,
            pair.lose_disk, pair.declare_dead, pair.release, pair.producer_hears,
            pair.start_again, pair.catch_up, pair.catch_up,
        ]  # fmt: skip
        for _ in range(150):
            chosen = chance.choice(rules)
            chosen(chance.choice(NAMES))
            pair.each_disk_that_counts_is_enough(seed)
            pair.there_is_always_one()
        seen["trimmed"] += pair.trimmed_upto >= 0
        seen["caught up"] += any(copy.epoch > 1 for copy in pair.copies.values())
        seen["released"] += any(known.released for known in pair.standings.values())
    assert min(seen.values()) > 100 and len(seen) == 3, seen
