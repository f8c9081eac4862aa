"""How a mistake is planted, and which checkers must report it."""

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
#: Default seed of the options; its options have no checkpoints.
OPTIONS_SEED = 1
MUTATIONS: list[Mutation] = []


@dataclass(frozen=True)
class Mutation:
    name: str
    #: At least one of these checkers must report the mistake.
    caught_by: tuple[str, ...]
    plant: Patch
    scene: Scene
    #: Seed of a random scenario that shows the mistake instead of a scene; 0: none.
    seed: int = 0
    #: The kind of scenario that the seed selects; None: any.
    only: str | None = None
    #: The run takes too long for every commit.
    slow: bool = False

    @property
    def run_key(self) -> object:
        """Equal for mutations that are shown by the same run."""
        return (self.seed, self.only) if self.seed else self.scene

    def run(self, patch: pytest.MonkeyPatch) -> set[str]:
        """The checkers that fail, except those that also fail without a mistake."""
        if self.seed:
            outcome = simulate(scenario_of(self.seed, self.only))
        else:
            outcome = self.scene.run(patch)
        return {verdict.checker for verdict in outcome.failed} - self.scene.also


def mutation(
    name: str, *caught_by: str, scene: str = "", seed: int = 0, only: str | None = None,
    faults: tuple[Fault, ...] = (), on: str = "pair", options_seed: int = OPTIONS_SEED,
    slow: bool = False,
) -> Callable[[Patch], Patch]:  # fmt: skip
    """`scene` names a shared scene; if no scene shows the mistake, `faults` are given instead."""

    def add(plant: Patch) -> Patch:
        run_scene = SCENES[scene] if scene else Scene(on, 20, faults, options_seed=options_seed)
        MUTATIONS.append(
            Mutation(name, caught_by, plant, run_scene, seed, only, slow or run_scene.is_long)
        )
        return plant

    return add


def options_seed_with(wanted: Callable[[Options], bool]) -> int:
    """The first seed with the wanted options."""
    return next(seed for seed in range(1, 10_000) if wanted(options_of(seed)))
