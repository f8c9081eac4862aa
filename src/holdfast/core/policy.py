"""Policy of a path: what it may do while inputs are missing, and during a correction."""

from __future__ import annotations

from holdfast.frozen import dataclass
from holdfast.model.network import Network
from holdfast.model.protection import CorrectionPolicy, FailurePolicy, Reconcile
from holdfast.model.trees import patience


@dataclass(frozen=True, slots=True)
class Policy:
    on_failure: FailurePolicy = "block"
    while_correcting: CorrectionPolicy = "suspend"
    reconcile: Reconcile = "checkpoint"
    #: How long a bucket may be held if no fragment upstream has delayed it, and how long if the
    #: fragments upstream have used up all of that time.
    patience_us: int = 0
    own_us: int = 0
    #: Peers, one of which may keep giving results while this replica corrects its own.
    peers: tuple[str, ...] = ()


def policy_of(network: Network, fragment: str, peers: tuple[str, ...]) -> Policy:
    """The policy of a fragment. Delays count from the start of a bucket, and a bucket is already
    one width old when its first boundary arrives. So the width is subtracted from the holding
    times."""
    protection, limits = network.protection(fragment), patience(network)[fragment]
    if limits is None:
        return Policy()
    spare_us = int((1 - protection.wait_share) * limits.own_us) + network.width_us
    return Policy(
        protection.on_failure, protection.while_correcting, protection.reconcile,
        max(0, limits.total_us - spare_us), max(0, limits.own_us - spare_us), peers,
    )  # fmt: skip
