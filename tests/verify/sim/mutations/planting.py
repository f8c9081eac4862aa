"""How a mistake is planted, and what is to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.config import Options
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.random_scenarios import options_of, scenario_of
from holdfast.verify.sim.simulation import simulate
from tests.verify.sim.mutations.scenes import SCENES, Scene

Patch = Callable[[pytest.MonkeyPatch], None]

S = 1_000_000
#: Decides about options: it has no checkpoints.
LOT = 1
MUTATIONS: list[Mutation] = []


@dataclass(frozen=True)
class Mutation:
    name: str
    #: Any of these may be the one that sees it.
    caught_by: tuple[str, ...]
    plant: Patch
    scene: Scene
    #: A random scenario that shows it instead; 0: none.
    seed: int = 0
    #: It takes too long for every commit.
    slow: bool = False

    @property
    def run_key(self) -> object:
        """The same for those that are shown by the same run."""
        return self.seed or self.scene

    def run(self, patch: pytest.MonkeyPatch) -> set[str]:
        """The checkers that see something, beside those that do without any mistake."""
        outcome = simulate(scenario_of(self.seed)) if self.seed else self.scene.run(patch)
        return {verdict.checker for verdict in outcome.failed} - self.scene.also


def mutation(
    name: str, *caught_by: str, scene: str = "", seed: int = 0, faults: tuple[Fault, ...] = (),
    on: str = "pair", lot: int = LOT, slow: bool = False,
) -> Callable[[Patch], Patch]:  # fmt: skip
    """`scene` is one of those that many share; where none shows the mistake, `faults` are written
    down with it."""

    def add(plant: Patch) -> Patch:
        shown = SCENES[scene] if scene else Scene(on, 20, faults, lot=lot)
        MUTATIONS.append(Mutation(name, caught_by, plant, shown, seed, slow or shown.is_long))
        return plant

    return add


def lot_with(wanted: Callable[[Options], bool]) -> int:
    """The first seed whose options are as wanted."""
    return next(seed for seed in range(1, 10_000) if wanted(options_of(seed)))
