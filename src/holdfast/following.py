"""Following a stream for ever: one connection after another, each from where the last one got to.

Node and client read alike. What they have taken is said to `core.following`, which decides; here is
only the loop around connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress

from holdfast.core.following import Following
from holdfast.errors import TransportError
from holdfast.transport.service import Delivery, Peer
from holdfast.types import Stability


def only_stable(delivery: Delivery) -> Delivery:
    """A delivery as a reader takes it that follows another replica."""
    kept = [segment.stability is Stability.STABLE for segment in delivery.segments]
    return replace(_some(delivery, kept), undone=False, tentative_upto=None, missing=())


def fresh(following: Following, delivery: Delivery, replica: str = "") -> Delivery:
    """What is new in a delivery. An instance that was replaced is cut off."""
    refused = following.refuses(delivery.epoch, delivery.since, replica)
    if refused is not None:
        raise TransportError(f"stream {delivery.stream!r}: {refused}")
    if delivery.undone:
        following.undone()
    new = [
        following.is_new(segment.id.bucket)
        if segment.stability is Stability.STABLE
        else following.is_younger(segment.id.bucket, segment.t_max_us)
        for segment in delivery.segments
    ]
    return delivery if all(new) else _some(delivery, new)


def _some(delivery: Delivery, kept: list[bool]) -> Delivery:
    return replace(
        delivery,
        segments=tuple(compress(delivery.segments, kept)),
        paths=tuple(compress(delivery.paths, kept)),
        tables=tuple(compress(delivery.tables, kept)),
    )


def follow(
    stream: str,
    following: Following,
    connect: Callable[[], Peer],
    stop: threading.Event,
    *,
    connected: Callable[[Peer], None] = lambda peer: None,
    lost: Callable[[Exception], None] = lambda err: None,
) -> Iterator[Delivery]:
    """Deliveries until the stream has ended or `stop` is set. The reader calls `following.taken`
    when it has one; whatever it could not take is delivered again."""
    while not stop.is_set():
        try:
            peer = connect()
            connected(peer)
            for delivery in peer.follow(stream, following.at, stop, following.after_us):
                yield fresh(following, delivery)
                if delivery.ended or stop.is_set():
                    return
        except TransportError as err:
            lost(err)
            stop.wait(following.lost() / 1_000)
