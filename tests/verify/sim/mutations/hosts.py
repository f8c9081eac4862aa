"""Mistakes in hosts, in standbys, and in the handling of failed components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.cluster.controller import Controller
from holdfast.core import failure_detector, hosts, membership, quarantine
from holdfast.verify.scenario import Fault
from tests.verify.sim.mutations.planting import S, mutation

ON = "pairs-hosts-2"


@mutation(
    "keep a node that is assigned to another host", "alive", "lost", "paired", "delay", "available",
    faults=(Fault(3 * S, "pause", "host-1", 5 * S),), on=ON,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = hosts.Host._assigned

    def greedy(self: hosts.Host, event: hosts.Answered) -> list[hosts.Action]:
        return original(self, replace(event, assigned=(*event.assigned, *self._nodes)))

    patch.setattr(hosts.Host, "_assigned", greedy)


@mutation(
    "let no standby replace a lost host", "paired", "lost", "alive",
    faults=(Fault(3 * S, "wipe", "host-1", 35 * S),), on=ON,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "take_overs", lambda *known: {})


@mutation(
    "move nodes from a lost host although their peers may be lost, too", "alive", "lost", seed=11989
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failure_detector.FailureDetector, "outlived", lambda self, name, peer: True)


@mutation(
    "move the nodes of a lost host to the host of their peers", "lost", "alive", "wrong",
    faults=(Fault(3 * S, "wipe", "host-1", 25 * S), Fault(13 * S, "wipe", "host-2", S)), on=ON,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    def crowded(
        runs: Mapping[str, Sequence[str]],
        peers: Mapping[str, str],
        detector: failure_detector.FailureDetector,
        at: int,
    ) -> dict[str, str]:
        silent = [h for h in runs if detector.silent(membership.process_of(h), at)]
        gone = detector.dead_us(at)
        return {node: "host-2" for host in silent for node in runs[host] if node in gone}

    patch.setattr(membership, "take_overs", crowded)


@mutation(
    "move nodes from a host before a restarted controller has its heartbeat", "alive",
    faults=(
        Fault(3 * S, "pause", "host-1", 5 * S), Fault(12 * S, "kill", "host-4", 2_500_000),
        Fault(12_700_000, "kill", "controller", 3 * S),
    ), on="pairs-hosts-3",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        failure_detector.FailureDetector, "silent", lambda self, name, at: not self.speaks(name, at)
    )


@mutation(
    "report to a replaced host that it is current", "alive", "lost", "paired",
    faults=(Fault(3 * S, "replace", "lower.0", 3 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Controller, "here", lambda self, host, epoch, at: True)


@mutation(
    "never restart a failed component", "lost", "alive", "paired", "available",
    faults=(Fault(3 * S, "pause", "lower.0", 5 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    once: Any = {kind: replace(how, repeated=False) for kind, how in quarantine.POLICIES.items()}
    patch.setattr(quarantine, "POLICIES", once)
