"""`protect(recovery=...)` decides for one fragment what its producers retain."""

from __future__ import annotations

from functools import partial

from holdfast.config import Options
from holdfast.model.network import Network
from holdfast.model.protection import RecoveryPolicy
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import single
from tests.verify.sim.lab import Lab, S

OPTIONS = Options(recovery="checkpoint", checkpoint_buckets=3)
WIPE = Fault(8 * S, "wipe", "main", S)


def network(recovery: RecoveryPolicy | None) -> Network:
    """One output is a running total, whose state needs every row of the stream."""
    net = single()
    net.protect("main", on_failure="block", recovery=recovery)
    return net


def test_a_fragment_with_replay_survives_the_loss_of_its_storage(lab: Lab) -> None:
    outcome = lab.run(partial(network, "replay"), WIPE, seconds=14, options=OPTIONS)
    assert outcome.failed == []


def test_checkers_report_the_loss_of_storage_of_a_fragment_without_replay(lab: Lab) -> None:
    outcome = lab.run(partial(network, None), WIPE, seconds=14, options=OPTIONS)
    assert {"lost", "alive"} & {verdict.checker for verdict in outcome.failed}
