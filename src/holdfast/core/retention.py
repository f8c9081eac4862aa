"""What may be deleted: what a node releases of its inputs, and what a producer retains for a pair
of consumers. Pure. The log deletes what all its consumers have released.

**A node** acknowledges its inputs with a released position. It depends on the recovery mode:

`replay`      An empty node must be able to rebuild its state and every output that its consumers
              still need. Inputs are retained for the extent of the windows before the slowest
              consumer, or from the first bucket on if an operator is not convergent.
`checkpoint`, `cec`
              The inputs after the newest durable state version, and those that it refers to.
`pairs`       As `checkpoint`; without checkpoints a lost replica is rebuilt from its peer.

**A pair** (Flux sections 3.2.2, 5.3.2). Each replica reports up to which bucket it has released a
stream: the inputs before its newest checkpoint. A producer deletes what both replicas have
released. Therefore *each disk of the pair, together with what the producers retain, can rebuild
everything that was not acknowledged downstream*. One disk may be lost, and the other one is enough.

The same must hold while one replica is dead, because its disk may return or may be lost:

`dead`      The released position of the replica is retained, so its disk remains sufficient if the
            other one is lost. No producer waits for the replica: its received position is FOREVER.
`released`  The replica was dead for longer than the `rejoin` option of the run, and its disk is
            given up (`ack_all`). From then on the pair has one disk, and the retained data is
            bounded.
`held`      A successor is being caught up. Producers retain what they have (`reset`) while the
            successor renews its request. The successor may still fall back to the old disk, which
            is replaced only when the new log is complete. Only then does the successor report a
            position of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.catch_up_events import LEASE_US
from holdfast.core.membership import InstanceStatus
from holdfast.core.path_state import PathState
from holdfast.core.sunion import FOREVER


def released_upto(
    path: PathState, recovery: str, *, unpaired: bool, checkpoints: bool, delivered: int
) -> int:
    """Last bucket of its inputs that a path has released. `delivered`: the last bucket that all
    consumers of all its outputs have released."""
    assert path.position is not None
    keep_from = min(path.needs_from, path.position + 1)
    if path.consistency.position is not None:
        keep_from = min(keep_from, path.consistency.needs_from)
    durable_from = path.durable[1] if path.durable else path.origin
    if recovery == "pairs" and not (unpaired or checkpoints):
        return keep_from - 1
    if recovery in ("checkpoint", "cec", "pairs"):
        return min(keep_from, durable_from) - 1
    if not path.plan.convergent:
        return path.origin - 1
    keep_from = min(keep_from, delivered + 1 - path.plan.extent)
    if checkpoints:
        keep_from = min(keep_from, durable_from)
    return max(keep_from, path.origin) - 1


class Position(NamedTuple):
    """Last acknowledgement of a consumer for a stream."""

    received: int
    #: Last bucket that the consumer has released.
    needed: int
    #: Epoch of the instance that acknowledged; 0: no instance has acknowledged yet.
    epoch: int


def position_of_gone(
    status: InstanceStatus, last: Position, trimmed_upto: int, held_at: int | None, at: int
) -> Position | None:
    """The position to record for a dead replica of a pair instead of its `last` one. None: `last`
    remains valid. `held_at`: time of the last `Hold` request of a successor that this producer
    received."""
    if not status.gone:
        return None
    epoch = max(last.epoch, status.dead)
    released = status.released >= status.dead
    if last.epoch > status.dead:  # a successor has sent `Hold`, but is not registered yet
        if not released or held_at is None or at - held_at <= LEASE_US:
            return None
        return Position(FOREVER, FOREVER, epoch)
    needed = FOREVER if released else max(last.needed, trimmed_upto)
    position = Position(FOREVER, needed, epoch)
    return None if position == last else position
