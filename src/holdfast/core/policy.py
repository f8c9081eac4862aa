"""What a path may do while inputs are missing and while it is corrected, as its node is told."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.model.protection import FailurePolicy, HealingPolicy, Reconcile


@dataclass(frozen=True, slots=True)
class Policy:
    failure: FailurePolicy = "block"
    stabilization: HealingPolicy = "suspend"
    reconcile: Reconcile = "checkpoint"
    #: How long a bucket may be held that came straight from a source, and one of which all that was
    #: spent upstream.
    patience_us: int = 0
    own_us: int = 0
    #: Other replicas, one of which may go on answering while this one corrects itself.
    peers: tuple[str, ...] = ()
