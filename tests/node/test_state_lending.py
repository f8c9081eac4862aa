"""The files that a replica lends to a peer that is rebuilt, in virtual time: the production
executor, log and service on a network that keeps running."""

from __future__ import annotations

from typing import Any

from holdfast.config import Options
from holdfast.core.catch_up_events import LEASE_US, RENEW_US
from holdfast.node.node_events import StateAsked, StateReleased, StateRenewed
from holdfast.streams.calls import Moving
from holdfast.verify.scenario import Scenario
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulation import Simulation

S = 1_000_000
NEWCOMER = "lower.0@2"


class Running:
    """One pair on each of two levels."""

    def __init__(self) -> None:
        options = Options(checkpoint_buckets=3, recovery="checkpoint")
        self.sim = Simulation(Scenario("lending", "pairs-1", 60), options)
        for process in self.sim.cast.by_name.values():
            process.start()
        self.until(8)

    def until(self, second: float) -> None:
        self.sim.world.run_until(int(second * S))

    @property
    def node(self) -> NodeProcess:
        process = self.sim.cast.by_name["lower.0"]
        assert isinstance(process, NodeProcess)
        return process

    def lend(self) -> list[str]:
        """Names of the files that are offered to the newcomer."""
        answers: list[Any] = []
        self.node.performer.take(StateAsked(NEWCOMER, answers.append))
        (lent,) = answers
        assert isinstance(lent, tuple) and all(isinstance(moving, Moving) for moving in lent)
        segments = [s.path for moving in lent for r in moving.results for s in r.segments]
        return [f"state/{name}" for moving in lent for name in moving.files] + segments

    def there(self, names: list[str]) -> list[bool]:
        return [self.node.disk.exists(f"/lower.0/{name}") for name in names]


def test_lent_files_are_retained_although_consumers_acknowledge_them() -> None:
    running = Running()
    node = running.node
    names = running.lend()
    assert len(names) > 2 and all(running.there(names))
    for _ in range(12):
        running.until(running.sim.world.now / S + RENEW_US / S)
        node.performer.take(StateRenewed(NEWCOMER))
    for stream in node.fragment.outputs:
        assert node.log.trimmable(stream) > node.log.info(stream).trimmed_upto + 40
    assert all(running.there(names)) and all(node.piece(name) for name in names)
    node.performer.take(StateReleased(NEWCOMER))
    running.until(running.sim.world.now / S + 5)
    assert not any(running.there(names)) and not node.service.offered


def test_a_dead_newcomer_does_not_pin_files_forever() -> None:
    running = Running()
    names = running.lend()
    running.until(8 + LEASE_US / S - 1)
    assert all(running.there(names))
    running.until(8 + LEASE_US / S + 5)
    assert not any(running.there(names)) and not running.node.service.pins
