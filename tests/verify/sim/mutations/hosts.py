"""Mistakes in hosts, standbys and what becomes of parts that fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.cluster.controller import Controller
from holdfast.core import hosts, membership, quarantine
from holdfast.verify.scenario import Fault
from tests.verify.sim.mutations.planting import S, mutation

ON = "pairs-hosts-2"


@mutation(
    "keep a node that was given to another host", "alive", "lost", "paired", "delay", "available",
    faults=(Fault(3 * S, "pause", "host-1", 5 * S),), on=ON,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = hosts.Host._assigned

    def greedy(self: hosts.Host, event: hosts.Answered) -> list[hosts.Action]:
        return original(self, replace(event, assigned=(*event.assigned, *self._nodes)))

    patch.setattr(hosts.Host, "_assigned", greedy)


@mutation(
    "let nobody stand in for a lost host", "paired", "lost", "alive",
    faults=(Fault(3 * S, "wipe", "host-1", 35 * S),), on=ON,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "stand_ins", lambda runs, gone, speaks: {})


@mutation(
    "give the nodes of a lost host to the host of their peers", "lost", "alive", "wrong",
    faults=(Fault(3 * S, "wipe", "host-1", 25 * S), Fault(13 * S, "wipe", "host-2", S)), on=ON,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    def crowded(
        runs: Mapping[str, Sequence[str]], gone: Collection[str], speaks: Callable[[str], bool]
    ) -> dict[str, str]:
        return {n: "host-2" for h, names in runs.items() if not speaks(h) for n in names
                if n in gone}  # fmt: skip

    patch.setattr(membership, "stand_ins", crowded)


@mutation(
    "tell a host that was replaced that it is current", "alive", "lost", "paired",
    faults=(Fault(3 * S, "replace", "lower.0", 3 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controller, "here", lambda self, host, epoch, at: True)


@mutation(
    "try nothing again that failed", "lost", "alive", "paired", "available",
    faults=(Fault(3 * S, "pause", "lower.0", 5 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    once: Any = {kind: replace(how, repeated=False) for kind, how in quarantine.POLICIES.items()}
    patch.setattr(quarantine, "POLICIES", once)
