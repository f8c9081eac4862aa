"""How a mistake is planted, and what is to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.chance import scenario_of

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

    @property
    def scenario(self) -> Scenario:
        if self.seed:
            return scenario_of(self.seed)
        return Scenario(self.name, self.on, 20, self.faults, LOT)


S = 1_000_000
#: Decides about options: it has no checkpoints.
LOT = 1
MUTATIONS: list[Mutation] = []


def mutation(
    name: str, *caught_by: str, seed: int = 0, faults: tuple[Fault, ...] = (), on: str = "pair"
) -> Callable[[Patch], Patch]:
    def add(plant: Patch) -> Patch:
        MUTATIONS.append(Mutation(name, caught_by, seed, faults, on, plant))
        return plant

    return add
