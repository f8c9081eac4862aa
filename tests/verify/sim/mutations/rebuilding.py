"""Mistakes in the rebuild of a replica of a pair, and in the data retained for the replica."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.streams.serving
from holdfast.core.retention import position_of_gone
from holdfast.node.state_transfer import Staging
from holdfast.verify.scenario import Fault
from tests.verify.sim.mutations.planting import S, mutation, options_seed_with

CHECKPOINTS = options_seed_with(
    lambda o: o.checkpoint_buckets == 7 and o.rejoin == "1min" and o.buffer_buckets is None
)

#: One replica is down, and then the disk of its peer is lost.
ONE_DISK = (Fault(10 * S, "kill", "lower.0", 4 * S), Fault(11_500_000, "wipe", "lower.0@2", S))


@mutation(
    "retain nothing for the disk of a dead replica", "lost", "paired", "alive",
    faults=ONE_DISK, on="pairs-2", options_seed=CHECKPOINTS,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = position_of_gone

    def forgetful(standing: Any, *rest: Any) -> Any:
        return original(replace(standing, released=standing.dead), *rest)

    patch.setattr(holdfast.streams.serving, "position_of_gone", forgetful)


@mutation(
    "delete the old storage before the new one is complete", "lost", "paired", "alive",
    faults=(
        Fault(10 * S, "kill", "lower.0", 4 * S), Fault(14_060_000, "wipe", "lower.0@2", 3 * S),
    ), on="pairs-1", options_seed=CHECKPOINTS,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Staging.expect

    def hasty(self: Staging, offered: Any) -> Any:
        self._disk.remove_folder(self._folder)
        return original(self, offered)

    patch.setattr(Staging, "expect", hasty)
