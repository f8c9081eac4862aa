"""Replicas compare their results. Wrong bits in one replica are reported at once, a recomputation
finds the wrong replica, and that replica is rebuilt. The tests flip the bits: random scenarios do
not, because a wrong bucket that a client has received stays wrong."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from zlib import crc32

from holdfast.config import Options
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulation import Simulation
from tests.verify.sim.lab import flip_result

S = 1_000_000
OPTIONS = Options(checkpoint_buckets=20)
#: Checkers that fail if a wrong bucket is read before the divergence is detected.
GIVEN = {"converge", "wrong", "lost", "contract"}


class Broken:
    """A simulation in which the bits of a node are flipped at a given time."""

    def __init__(
        self, network: str, name: str, flip: Callable[[NodeProcess], None], at: int = 12 * S,
        faults: tuple[Fault, ...] = (), seed: int = 0,
    ) -> None:  # fmt: skip
        self.sim = Simulation(Scenario("flip", network, 40, faults, seed), OPTIONS)
        self.name = name
        self.sim.world.at(at, lambda: flip(self.node))
        self.outcome = self.sim.run()

    @property
    def node(self) -> NodeProcess:
        node = self.sim.cast.by_name[self.name]
        assert isinstance(node, NodeProcess)
        return node

    def events_of(self, event: str, node: str | None = None) -> list[tuple[int, str, str]]:
        return [
            (at, name, " ".join(map(str, more)))
            for at, name, text, more in self.outcome.world.trace
            if text == event and (node is None or name == node)
        ]

    def refuted(self) -> list[tuple[int, str, str]]:
        return [
            failure for failure in self.events_of("fails:") if failure[2].startswith("Refuted: ")
        ]

    def failed(self) -> set[str]:
        return {verdict.checker for verdict in self.outcome.failed}


def flip_state(node: NodeProcess) -> None:
    """Damages the newest layer of a state that the node continues from. No checkpoint refers to
    it."""
    performer = node.performer
    durable = {
        name for version in performer.checkpoints.newest.values() for name in version.files()
    }
    (name, *_) = [
        name
        for version in performer.versions.values()
        for shards in version.shards.values()
        for name in [shards[0].layers[-1].file]
        if name not in durable
    ]
    path = f"/{node.name}/state/{name}"
    state = dict(marshal.loads(node.disk.read(path)[4:]))
    key = min(state)
    changed = marshal.dumps(sorted({**state, key: state[key] + 1_000}.items()), 2)
    checksum = crc32(changed).to_bytes(4, "little")  # the engine has computed a wrong state
    node.disk.put(path, checksum + changed, fsync=False)


def test_without_a_fault_replicas_agree() -> None:
    broken = Broken("pairs-2", "lower.0@2", lambda node: None)
    assert broken.failed() == set()
    assert not broken.events_of("computed again") and not broken.refuted()


def test_a_replica_that_computed_wrong_rows_is_refuted_and_rebuilt() -> None:
    broken = Broken("pairs-1", "lower.0@2", flip_result)
    (at, node, why), *_ = broken.refuted()
    assert node == "lower.0@2" and at < 12 * S + 4 * S
    assert "differs between replicas: here" in why and "recomputation" in why
    assert broken.events_of("caught up, state from", "lower.0@2")
    assert broken.node.is_up and not broken.node.performer.comparison.differences
    assert not broken.failed() - GIVEN


def test_a_replica_whose_state_rots_is_refuted_and_rebuilt() -> None:
    broken = Broken("pairs-1", "lower.0@2", flip_state)
    refuted = broken.refuted()
    assert [node for _, node, _ in refuted][:1] == ["lower.0@2"]
    assert broken.node.is_up and not broken.node.performer.comparison.differences
    assert not broken.failed() - GIVEN


def test_a_replica_that_read_wrong_rows_is_refuted_too() -> None:
    """The downstream replica in the same dataflow has computed with the wrong rows."""
    broken = Broken("pairs-1", "lower.0@2", flip_state)
    (_, first, _), (_, second, why) = broken.refuted()
    assert (first, second) == ("lower.0@2", "upper.0@2")
    assert "but every producer has" in why
    upper = broken.sim.cast.by_name["upper.0@2"]
    assert isinstance(upper, NodeProcess) and not upper.performer.comparison.differences


def test_the_first_replica_is_refuted_when_the_second_replica_is_confirmed() -> None:
    broken = Broken("pairs-1", "lower.0", flip_result)
    ((_, node, _),) = [failure for failure in broken.refuted() if failure[1].startswith("lower")]
    assert node == "lower.0"
    recomputed = [
        node for _, node, _ in broken.events_of("computed again") if node.startswith("lower")
    ]
    assert recomputed == ["lower.0@2", "lower.0"], "replicas recompute one after the other"


def test_replicas_that_are_no_pair_compare_their_results_too() -> None:
    broken = Broken("pair", "main@2", flip_result)
    ((_, node, _),) = broken.refuted()
    assert node == "main@2"
    assert broken.node.is_up and not broken.node.performer.comparison.differences
