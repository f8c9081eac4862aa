"""What a path may do while inputs are missing and while it is corrected, as its node is told."""

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
    #: How long a bucket may be held that came straight from a source, and one of which all that was
    #: spent upstream.
    patience_us: int = 0
    own_us: int = 0
    #: Other replicas, one of which may go on answering while this one corrects itself.
    peers: tuple[str, ...] = ()


def policy_of(network: Network, fragment: str, peers: tuple[str, ...]) -> Policy:
    """How long buckets are held is counted from their beginning: they are one width old when the
    first of them comes."""
    protection, known = network.protection(fragment), patience(network)[fragment]
    if known is None:
        return Policy()
    spare_us = int((1 - protection.wait_share) * known.own_us) + network.width_us
    return Policy(
        protection.on_failure, protection.while_correcting, protection.reconcile,
        max(0, known.total_us - spare_us), max(0, known.own_us - spare_us), peers,
    )  # fmt: skip
