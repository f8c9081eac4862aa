"""Replicas compare what they made: wrong bits in one of them are reported at once, computing again
tells which, and that one is rebuilt. Bits are flipped by the test: no scenario draws them, because
what a client was given of a wrong bucket stays wrong."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from typing import Any

from holdfast.config import Options
from holdfast.engine.inputs import StepResult
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulation import Simulation
from holdfast.verify.sim.tables import Rows

S = 1_000_000
OPTIONS = Options(checkpoint_buckets=20)
#: What is seen of a bucket that was made wrong, if it was read before it was found.
GIVEN = {"converge", "wrong", "lost", "contract"}


class Broken:
    """A simulation with a node whose bits are flipped at some moment."""

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
        found = self.sim.cast.by_name[self.name]
        assert isinstance(found, NodeProcess)
        return found

    def said(self, what: str, who: str | None = None) -> list[tuple[int, str, str]]:
        return [
            (at, name, " ".join(map(str, more)))
            for at, name, text, more in self.outcome.world.trace
            if text == what and (who is None or name == who)
        ]

    def refuted(self) -> list[tuple[int, str, str]]:
        return [told for told in self.said("fails:") if told[2].startswith("Refuted: ")]

    def failed(self) -> set[str]:
        return {verdict.checker for verdict in self.outcome.failed}


def flip_result(node: NodeProcess) -> None:
    """The next bucket that it computes has a wrong row, once."""
    engine = node.performer.engine
    original: Any = engine.run

    def wrong(path: Any, version: Any, lo: int, hi: int, inputs: Any, **how: Any) -> StepResult:
        result: StepResult = original(path, version, lo, hi, inputs, **how)
        for stream, made in result.outputs.items():
            if made and engine.run is wrong:
                bucket, table = made[0]
                result.outputs[stream][0] = (bucket, Rows(table.rows).damaged())
                engine.run = original  # type: ignore[method-assign]
        return result

    engine.run = wrong  # type: ignore[method-assign]


def flip_state(node: NodeProcess) -> None:
    """A file of the state that it goes on from, and that no checkpoint refers to."""
    does = node.performer
    durable = {name for version in does._durable.values() for name in version.files()}
    (name, *_) = [
        name
        for version in does.versions.values()
        for held in version.shards.values()
        for name in [held[0].file]
        if name not in durable
    ]
    path = f"/{node.name}/state/{name}"
    state = dict(marshal.loads(node.disk.read(path)))
    key = min(state)
    changed = sorted({**state, key: state[key] + 1_000}.items())
    node.disk.put(path, marshal.dumps(changed, 2), fsync=False)


def test_without_a_fault_replicas_agree() -> None:
    broken = Broken("pairs-2", "lower.0@2", lambda node: None)
    assert broken.failed() == set()
    assert not broken.said("computed again") and not broken.refuted()


def test_a_copy_that_computed_wrong_is_refuted_and_rebuilt() -> None:
    broken = Broken("pairs-1", "lower.0@2", flip_result)
    (at, who, why), *_ = broken.refuted()
    assert who == "lower.0@2" and at < 12 * S + 4 * S
    assert "was made otherwise: here" in why and "computed again" in why
    assert broken.said("comes up from", "lower.0@2")
    assert broken.node.is_up and not broken.node.performer.comparison.differences
    assert not broken.failed() - GIVEN


def test_a_copy_whose_state_rots_is_refuted_and_rebuilt() -> None:
    broken = Broken("pairs-1", "lower.0@2", flip_state)
    refuted = broken.refuted()
    assert [who for _, who, _ in refuted][:1] == ["lower.0@2"]
    assert broken.node.is_up and not broken.node.performer.comparison.differences
    assert not broken.failed() - GIVEN


def test_what_read_the_wrong_rows_is_refuted_too() -> None:
    """The copy downstream in the same dataflow has computed with them."""
    broken = Broken("pairs-1", "lower.0@2", flip_state)
    (_, first, _), (_, second, why) = broken.refuted()
    assert (first, second) == ("lower.0@2", "upper.0@2")
    assert "of which every producer says" in why
    upper = broken.sim.cast.by_name["upper.0@2"]
    assert isinstance(upper, NodeProcess) and not upper.performer.comparison.differences


def test_the_first_copy_is_refuted_when_the_second_one_is_confirmed() -> None:
    broken = Broken("pairs-1", "lower.0", flip_result)
    ((_, who, _),) = [told for told in broken.refuted() if told[1].startswith("lower")]
    assert who == "lower.0"
    again = [who for _, who, _ in broken.said("computed again") if who.startswith("lower")]
    assert again == ["lower.0@2", "lower.0"], "one after the other"


def test_replicas_that_switch_compare_too() -> None:
    broken = Broken("pair", "main@2", flip_result)
    ((_, who, _),) = broken.refuted()
    assert who == "main@2"
    assert broken.node.is_up and not broken.node.performer.comparison.differences
