"""What a producer keeps for the copies of a pair that read it (Flux sections 3.2.2, 5.3.2). Pure.

Each copy says up to which bucket it no longer needs a stream: what lies behind its newest
checkpoint. A producer deletes what both no longer need. So at any time *each disk of the pair,
together with what the producers keep, rebuilds everything that was not acknowledged downstream*;
one of them may be lost, and the other one is enough.

That must hold, too, while one copy is dead, because nobody knows what becomes of its disk:

`dead`      its position stays, so its disk remains enough should the other one be lost. Nobody
            waits for it: it counts as having received everything, and stops no producer;
`released`  it was dead for longer than the run's `rejoin`: its disk counts no more (`ack_all`).
            From then on the pair has one disk, and what is kept is bounded;
`held`      a successor is being caught up, and keeps what there is (`reset`), for as long as it
            speaks up. It may still fall back on the old disk: that is replaced only when the new
            log is complete, and only then does the successor say a position of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.catch_up_events import LEASE_US
from holdfast.core.membership import Standing
from holdfast.core.sunion import FOREVER


class Position(NamedTuple):
    """What a reader said last of a stream."""

    received: int
    #: Up to here the reader needs nothing any more.
    needed: int
    #: Of the instance that said it; 0: none ever did.
    epoch: int


def position_of_gone(
    standing: Standing, last: Position, trimmed_upto: int, held_at: int | None, at: int
) -> Position | None:
    """What is to be taken down for a reader of a pair, in place of what it said `last`; None: that
    stands. `held_at`: when a successor last asked to hold, as far as this producer knows."""
    if not standing.gone:
        return None
    epoch = max(last.epoch, standing.dead)
    released = standing.released >= standing.dead
    if last.epoch > standing.dead:  # a successor holds, which has not registered yet
        if not released or held_at is None or at - held_at <= LEASE_US:
            return None
        return Position(FOREVER, FOREVER, epoch)
    needed = FOREVER if released else max(last.needed, trimmed_upto)
    found = Position(FOREVER, needed, epoch)
    return None if found == last else found
