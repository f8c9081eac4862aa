"""What is retained for the replicas of a pair: either disk alone is enough (Flux section 3.2.2).

The pair consists of two real `Progress` machines and one producer that follows `core.retention`.
Random events decide which replica crashes, which disk is lost, and when deaths are declared and
positions are acknowledged. One disk may be lost at a time: the next one only when two disks of the
pair count again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from holdfast.core import progress_events as core
from holdfast.core.catch_up_events import LEASE_US
from holdfast.core.job_size import JobLimits
from holdfast.core.membership import InstanceStatus
from holdfast.core.progress import Progress
from holdfast.core.retention import Position, position_of_gone
from holdfast.core.sunion import FOREVER

PLAN = core.PathPlan("out", ("s",), ("out",), convergent=False, extent=2)
NAMES = ("a", "a@2")


# -- the rule -------------------------------------------------------------------------------------


LAST = Position(9, 4, 2)


def test_a_live_replica_has_the_position_that_it_acknowledged() -> None:
    assert position_of_gone(InstanceStatus(2, 1), LAST, 1, None, 0) is None


def test_3_2_2_producers_do_not_wait_for_a_dead_replica_but_retain_inputs_for_its_disk() -> None:
    position = position_of_gone(InstanceStatus(2, 2), LAST, 1, None, 0)
    assert position == Position(FOREVER, 4, 2)
    assert position_of_gone(InstanceStatus(2, 2), position, 1, None, 0) is None, "reported once"


def test_everything_is_retained_for_a_dead_replica_that_never_acknowledged() -> None:
    position = position_of_gone(InstanceStatus(2, 2), Position(-1, -1, 0), 3, None, 0)
    assert position == Position(FOREVER, 3, 2)


def test_3_2_2_a_released_disk_acknowledges_everything() -> None:
    position = position_of_gone(InstanceStatus(2, 2, 2), LAST, 1, None, 0)
    assert position == Position(FOREVER, FOREVER, 2)


def test_the_release_of_an_earlier_instance_has_no_effect() -> None:
    assert position_of_gone(InstanceStatus(2, 2, 1), LAST, 1, None, 0) == Position(FOREVER, 4, 2)


def test_5_3_2_inputs_are_retained_for_a_successor_while_it_renews_its_hold() -> None:
    held, at = Position(4, 4, 3), 5 * LEASE_US
    for status, held_at in (
        (InstanceStatus(2, 2), 0),
        (InstanceStatus(2, 2, 2), at - LEASE_US),
        (InstanceStatus(2, 2, 2), None),
    ):
        assert position_of_gone(status, held, 4, held_at, at) is None
    position = position_of_gone(InstanceStatus(2, 2, 2), held, 4, at - LEASE_US - 1, at)
    assert position == Position(FOREVER, FOREVER, 3)


# -- one disk is enough ---------------------------------------------------------------------------


@dataclass
class Disk:
    """What survives a crash: a checkpoint with its needed inputs, and the results."""

    version: tuple[int, int] | None = None
    #: The first bucket of the results that is retained.
    kept_from: int = 0


@dataclass
class Copy:
    name: str
    epoch: int = 1
    memory: Progress | None = None
    disk: Disk = field(default_factory=Disk)
    #: The disk counts: the pair may be rebuilt from it.
    counts: bool = True
    #: The replica holds its inputs, and has not started yet.
    catching_up: bool = False
    unsaid: list[Position] = field(default_factory=list)
    #: The checkpoint that is being written, and the one that is on the disk, but not yet reported
    #: to the node.
    flushing: core.CheckpointDone | None = None
    saved: core.CheckpointDone | None = None


class Pair:
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.closed_upto = -1
        self.trimmed_upto = -1
        self.positions: dict[str, Position] = {}
        #: The client's position.
        self.acknowledged = -1
        self.statuses = {name: InstanceStatus(1, 0) for name in NAMES}
        self.copies = {name: Copy(name) for name in NAMES}
        for replica in self.copies.values():
            self._come_up(replica, None)

    # -- the world --------------------------------------------------------------------------------

    def close(self, name: str) -> None:
        self.closed_upto += self._chance.randint(1, 7)
        for replica in self.copies.values():
            self._tell(replica, core.BoundaryArrived(0, "s", self.closed_upto))

    def work(self, name: str) -> None:
        """Run a step. Its checkpoint may not be written or reported yet, and acknowledgements may
        still be in flight."""
        replica, delivered = self.copies[name], self._chance.randint(0, 9)
        path = None if replica.memory is None else replica.memory.paths["out"]
        if path is not None and (hi := path.running_upto) is not None:
            needs_from = max(0, path.needs_from, hi + 1 - self._chance.randint(0, 2))
            self._tell(replica, core.StepDone(0, "out", hi, needs_from, hi))
        self._flush(replica)
        if replica.saved is not None and self._chance.random() < 0.8:
            saved, replica.saved = replica.saved, None
            self._tell(replica, saved)
        for position in replica.unsaid[:delivered]:
            self._take(name, position)
        replica.unsaid = replica.unsaid[delivered:]

    def read_results(self, name: str) -> None:
        """The client reads the results of one replica, and acknowledges them to the live ones."""
        memory = self.copies[name].memory
        if memory is not None and (position := memory.paths["out"].position) is not None:
            self.acknowledged = max(self.acknowledged, position)
            for replica in self.copies.values():
                if replica.memory is not None:
                    replica.disk.kept_from = max(replica.disk.kept_from, self.acknowledged + 1)

    def crash(self, name: str) -> None:
        replica = self.copies[name]
        replica.memory, replica.catching_up, replica.unsaid = None, False, []
        replica.flushing = replica.saved = None

    def lose_disk(self, name: str) -> None:
        if all(replica.counts for replica in self.copies.values()):
            self.crash(name)
            replica = self.copies[name]
            replica.disk, replica.counts = Disk(kept_from=FOREVER), False

    # -- the controller ---------------------------------------------------------------------------

    def declare_dead(self, name: str) -> None:
        """The declaration may be wrong: the replica may be alive."""
        peer = self._other(name)
        if self.statuses[peer.name].lives and self.statuses[name].lives and peer.memory:
            status = self.statuses[name]
            self.statuses[name] = InstanceStatus(status.epoch, status.epoch, status.released)
            self._tell(peer, core.Unpaired(0, True))

    def release(self, name: str) -> None:
        status, peer = self.statuses[name], self._other(name)
        if status.gone and self.statuses[peer.name].lives and peer.memory and peer.counts:
            self.statuses[name] = InstanceStatus(status.epoch, status.dead, status.dead)
            self.copies[name].counts = False

    def producer_hears(self, _: str) -> None:
        for name, status in self.statuses.items():
            position = position_of_gone(
                status, self.positions[name], self.trimmed_upto, held_at=0, at=0
            )
            if position is not None:
                self._take(name, position)

    # -- restart ----------------------------------------------------------------------------------

    def start_again(self, name: str) -> None:
        """A new instance asks producers to hold before it does anything else."""
        replica = self.copies[name]
        if replica.memory is None:
            replica.epoch += 1
            replica.catching_up = True
            self._take(name, Position(self.trimmed_upto, self.trimmed_upto, replica.epoch))

    def catch_up(self, name: str) -> None:
        replica, peer = self.copies[name], self._other(name)
        if not replica.catching_up:
            return
        peer_path = peer.memory.paths["out"] if peer.memory is not None else None
        if peer_path is not None and peer_path.position is not None:
            if peer_path.needs_from <= self.trimmed_upto:
                return  # the peer was declared dead, and its inputs are no longer retained
            replica.disk = Disk((peer_path.position, peer_path.needs_from), peer.disk.kept_from)
            self._come_up(replica, replica.disk.version)
        elif replica.counts and peer.memory is None:
            self._come_up(replica, replica.disk.version)

    # -- what must hold ---------------------------------------------------------------------------

    def each_disk_that_counts_is_enough(self, seed: int) -> None:
        for replica in self.copies.values():
            if not replica.counts:
                continue
            needs_from = 0 if replica.disk.version is None else replica.disk.version[1]
            assert self.trimmed_upto < needs_from, (
                f"seed {seed}: {replica.name} cannot be rebuilt from its disk"
            )
            assert replica.disk.kept_from <= self.acknowledged + 1

    def there_is_always_one(self) -> None:
        assert any(replica.counts for replica in self.copies.values())

    # -- inside -----------------------------------------------------------------------------------

    def _other(self, name: str) -> Copy:
        return self.copies[NAMES[1 - NAMES.index(name)]]

    def _come_up(self, replica: Copy, version: tuple[int, int] | None) -> None:
        resumed = None if version is None else {"out": (*version, 0)}
        replica.memory = Progress(
            [PLAN], recovery="pairs", resumed=resumed, checkpoint_buckets=3, limits=JobLimits(4)
        )
        replica.catching_up, replica.counts = False, True
        self.positions.setdefault(replica.name, Position(-1, -1, 0))
        status = self.statuses[replica.name]
        self.statuses[replica.name] = InstanceStatus(replica.epoch, status.dead, status.released)
        for member in (replica, self._other(replica.name)):
            gone = self.statuses[self._other(member.name).name].gone
            self._tell(member, core.Unpaired(0, gone))
        self._tell(replica, core.Began(0))
        self._tell(replica, core.InputOpened(0, "s", 0, self.trimmed_upto))
        self._tell(replica, core.BoundaryArrived(0, "s", self.closed_upto))

    def _flush(self, replica: Copy) -> None:
        """The checkpoint becomes durable, fails, or takes longer."""
        done, chance = replica.flushing, self._chance.random()
        if done is None or chance < 0.2:
            return
        replica.flushing = None
        if chance < 0.3:
            self._tell(replica, core.CheckpointFailed(0, "out"))
        else:
            replica.disk.version, replica.saved = (done.bucket, done.needs_from), done

    def _tell(self, replica: Copy, event: core.Event) -> None:
        if replica.memory is None:
            return
        for action in replica.memory.handle(event):
            match action:
                case core.Checkpoint():
                    assert replica.flushing is None and replica.saved is None
                    needs_from = replica.memory.paths["out"].needs_from
                    replica.flushing = core.CheckpointDone(0, "out", action.bucket, needs_from)
                case core.Acknowledge():
                    position = Position(action.received, action.no_longer_needed, replica.epoch)
                    replica.unsaid.append(position)
                case core.Fail():
                    raise AssertionError(action.why)

    def _take(self, name: str, position: Position) -> None:
        """As a log does: an older instance is ignored, and positions never decrease."""
        last = self.positions[name]
        if position.epoch < last.epoch:
            return
        if position.epoch == last.epoch:
            position = Position(
                max(position.received, last.received),
                max(position.needed, last.needed),
                position.epoch,
            )
        self.positions[name] = position
        if all(other.epoch for other in self.positions.values()):
            needed = min(other.needed for other in self.positions.values())
            self.trimmed_upto = max(self.trimmed_upto, min(needed, self.closed_upto))


def test_each_disk_of_a_pair_is_enough_to_rebuild_what_is_not_acknowledged() -> None:
    """At any time each disk that counts, together with what the producer retains, can rebuild
    everything that is not acknowledged downstream."""
    counts: Counter[str] = Counter()
    for seed in range(300):
        pair = Pair(chance := Random(seed))
        events = [
            pair.close, pair.work, pair.work, pair.work, pair.read_results, pair.crash,
            pair.lose_disk, pair.declare_dead, pair.release, pair.producer_hears,
            pair.start_again, pair.catch_up, pair.catch_up,
        ]  # fmt: skip
        for _ in range(150):
            event = chance.choice(events)
            event(chance.choice(NAMES))
            pair.each_disk_that_counts_is_enough(seed)
            pair.there_is_always_one()
        counts["trimmed"] += pair.trimmed_upto >= 0
        counts["caught up"] += any(replica.epoch > 1 for replica in pair.copies.values())
        counts["released"] += any(status.released for status in pair.statuses.values())
    assert min(counts.values()) > 100 and len(counts) == 3, counts
