"""How a mistake is planted, and what is to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.config import Options
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.chance import options_of, scenario_of

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    name: str
    #: Any of these may be the one that sees it.
    caught_by: tuple[str, ...]
    #: The first seed at which one of them does; 0: what is in `faults`, on a network of its own.
    seed: int
    faults: tuple[Fault, ...]
    on: str
    plant: Patch
    #: Decides about options, where the scenario was written for the mistake.
    lot: int

    @property
    def scenario(self) -> Scenario:
        if self.seed:
            return scenario_of(self.seed)
        return Scenario(self.name, self.on, 20, self.faults, self.lot)


S = 1_000_000
#: Decides about options: it has no checkpoints.
LOT = 1
MUTATIONS: list[Mutation] = []


def mutation(
    name: str, *caught_by: str, seed: int = 0, faults: tuple[Fault, ...] = (), on: str = "pair",
    lot: int = LOT,
) -> Callable[[Patch], Patch]:  # fmt: skip
    def add(plant: Patch) -> Patch:
        MUTATIONS.append(Mutation(name, caught_by, seed, faults, on, plant, lot))
        return plant

    return add


def lot_with(wanted: Callable[[Options], bool]) -> int:
    """The first seed whose options are as wanted."""
    return next(seed for seed in range(1, 10_000) if wanted(options_of(seed)))
