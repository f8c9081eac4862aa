"""Mistakes in pairs and partitions (Flux)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.cluster.controller
import holdfast.node.state_lending
import holdfast.verify.sim.simulated_engine
from holdfast.core import membership, progress
from holdfast.core.replica_selector import NOTHING, ReplicaSelector
from holdfast.node.state_transfer import Staging, describe
from holdfast.streams.serving import Service
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_process import Member
from tests.verify.sim.mutations.planting import S, mutation


@mutation(
    "wait for a dead consumer", "paired",
    faults=(Fault(3 * S, "wipe", "lower.0@2", 35 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Service, "lost", lambda self, statuses, at: None)


@mutation(
    "transfer the state without the retained results", "alive", "lost",
    faults=(
        Fault(3 * S, "kill", "egress", 11 * S),
        Fault(4 * S, "wipe", "upper.0@2", S),
        Fault(9 * S, "wipe", "upper.0", S),
    ), on="pairs-1",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = describe

    def bare(log: Any, version: Any, outputs: Any) -> Any:
        offer = original(log, version, outputs)
        results = [replace(r, trimmed_upto=r.complete_upto, segments=()) for r in offer.results]
        return replace(offer, results=tuple(results))

    patch.setattr(holdfast.node.state_lending, "describe", bare)


@mutation(
    "stay with the local replica when it is cut off", "standing", "available",
    faults=(
        Fault(4 * S, "cut", "ingress<->lower.0", 12 * S),
        Fault(4 * S, "cut", "lower.0@2<->upper.0@2", 12 * S),
    ), on="pairs-1", options_seed=6,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._furthest

    def faithful(self: ReplicaSelector, status: Any, *rest: Any) -> int:
        return NOTHING if status.replica == self.local_replica else original(self, status, *rest)

    patch.setattr(ReplicaSelector, "_furthest", faithful)


ALONE = (Fault(3 * S, "wipe", "lower.0@2", 12 * S), Fault(9 * S, "kill", "lower.0", S))


@mutation(
    "write no checkpoint when unpaired", "paired", "alive", "lost", "wrong", scene="pairs_alone"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._unpaired

    def careless(self: progress.Progress, unpaired: bool, at: int) -> Any:
        original(self, unpaired, at)
        return []

    patch.setattr(progress.Progress, "_unpaired", careless)
    patch.setattr(progress, "PAIR_CHECKPOINT_BUCKETS", 10_000)


@mutation("release inputs when unpaired", "alive", "lost", "wrong", faults=ALONE, on="pairs-1")
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._needed

    def generous(self: progress.Progress, path: Any) -> int:
        unpaired, self.unpaired = self.unpaired, False
        try:
            return original(self, path)
        finally:
            self.unpaired = unpaired

    patch.setattr(progress.Progress, "_needed", generous)


@mutation(
    "declare both replicas of a pair dead", "alive", "lost", "paired", "delay",
    faults=(Fault(5 * S, "cut", "controller<->lower.0,lower.0@2", 5 * S),), on="pairs-1",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    def harsh(peers: Any, statuses: Any, detector: Any, at: int) -> list[str]:
        silent = [name for name in peers if detector.silent(name, at)]
        return [name for name in silent if statuses[name].lives]

    patch.setattr(membership, "lost", harsh)


@mutation(
    "stay with the replica of the same dataflow", "available", "delay", "lost",
    faults=(Fault(3 * S, "wipe", "lower.0", 14 * S), Fault(3 * S, "wipe", "upper.0@2", 14 * S)),
    on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._best

    def faithful(self: ReplicaSelector, *args: Any) -> str | None:
        best = original(self, *args)
        return best if self.local_replica is None or best == self.local_replica else None

    patch.setattr(ReplicaSelector, "_best", faithful)


@mutation(
    "keep the old storage beside the transferred state", "alive", "wrong", "lost",
    faults=(Fault(3 * S, "kill", "lower.0@2", 4 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Staging.install

    def beside(self: Staging, open_log: Any, epoch: int) -> None:
        original(self, lambda folder: open_log(folder.removesuffix(".new")), epoch)

    patch.setattr(Staging, "install", beside)
    patch.setattr(Staging, "replace", lambda self: None)


@mutation(
    "transfer the state of one bucket as that of the next",
    "wrong",
    "alive",
    "lost",
    scene="pairs_wipe",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = describe

    def ahead(log: Any, version: Any, outputs: Any) -> Any:
        offer = original(log, version, outputs)
        return replace(offer, bucket=offer.bucket + 1)

    patch.setattr(holdfast.node.state_lending, "describe", ahead)


@mutation("start empty although the peer has state", "wrong", "alive", "lost", scene="pairs_wipe")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeProcess, "_ready", Member._ready)


@mutation("delete the state during its transfer to the peer", "alive", "lost", scene="pairs_wipe")
def _(patch: pytest.MonkeyPatch) -> None:
    original = NodeProcess.offer_state

    def hasty(self: NodeProcess, newcomer: str) -> Any:
        offered = original(self, newcomer)
        for path in self.fragment.paths if self.is_up else ():
            self.performer.engine.release(path, [])
        return offered

    patch.setattr(NodeProcess, "offer_state", hasty)


@mutation("send a key to two partitions", "wrong", "doubled", scene="pairs_two")
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.verify.sim.simulated_engine.belongs

    def loose(key: int, of: int) -> Any:
        class Any2(int):
            def __eq__(self, other: object) -> bool:
                return int(self) == other or (key == 3 and other == 0)

            __hash__ = int.__hash__

        return Any2(original(key, of))

    patch.setattr(holdfast.verify.sim.simulated_engine, "belongs", loose)
