"""Failures of input streams on purpose, and what a client of the network saw of them.

The sources of these experiments make rows that follow from the time alone, so what should have
arrived is known without having been written down. A connection is cut between a source and the node
that reads it; the source itself goes on, and what was missed flows once the connection is mended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.client import BucketInfo, Client
from holdfast.errors import HoldfastError, TransportError
from holdfast.log.rows import times_us
from holdfast.running import Run
from holdfast.source import now_us
from holdfast.transport.service import Delivery, Peer
from holdfast.types import Stability, StreamInfo

#: Rows of every source here: which one it is, and the number of the row.
SCHEMA = "ts timestamp, source int, n long"
#: A failure that is not corrected by then never will be.
LIMIT_S = 120.0


class Breakable(Run):
    """A run whose connections to the nodes can be cut, stream by stream."""

    def __init__(self, network: hf.Network, **how: Any) -> None:
        super().__init__(network, **how)
        self._cut: set[str] = set()
        #: When something first came through a connection that had been mended, by stream.
        self.back_at_us: dict[str, int] = {}

    def cut(self, stream: str) -> None:
        self._cut.add(stream)
        self.back_at_us.pop(stream, None)

    def heal(self, stream: str) -> None:
        self._cut.discard(stream)

    def through(self, stream: str) -> None:
        """Raises while the stream is cut."""
        if stream in self._cut:
            raise TransportError(f"the connection to {stream!r} is cut")

    def peer_of(self, stream: str, reader: str, maker: str) -> Peer:
        self.through(stream)
        return _Line(super().peer_of(stream, reader, maker), stream, self)


class _Line:
    """A peer at the other end of a connection that can be cut."""

    def __init__(self, peer: Peer, stream: str, run: Breakable) -> None:
        self._peer, self._stream, self._run = peer, stream, run

    def streams(self) -> list[StreamInfo]:
        self._run.through(self._stream)
        return self._peer.streams()

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: threading.Event,
        tentative_after_us: int | None = None,
    ) -> Iterator[Delivery]:
        self._run.through(self._stream)
        for delivery in self._peer.follow(stream, from_bucket, stop, tentative_after_us):
            self._run.through(self._stream)
            self._run.back_at_us.setdefault(self._stream, now_us())
            yield delivery

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        self._run.through(self._stream)
        self._peer.acknowledge(stream, reader, received, needed, epoch)

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        self._run.through(self._stream)
        self._peer.push(source, table, token, flush)

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._run.through(self._stream)
        return self._peer.call(name, body)

    def close(self) -> None:
        self._peer.close()


class Numbered:
    """Rows of one source, `rate` of them in a second: row `n` is stamped n / rate seconds after
    1970, so that its number says when it was due."""

    def __init__(self, source: int, rate: int) -> None:
        self.source, self.rate = source, rate
        #: The numbers made: from the first to before the last.
        self.since: int | None = None
        self.until = 0

    def due(self, at_us: int) -> int:
        """The first number that is stamped at this time or later."""
        return -(-at_us * self.rate // 1_000_000)

    def __call__(self, number: int, from_us: int, to_us: int) -> dict[str, Any]:
        n = np.arange(self.due(from_us), self.due(to_us))
        if self.since is None:
            self.since = self.due(from_us)
        self.until = self.due(to_us)
        source = np.full(len(n), self.source, np.int32)
        return {"ts": n * 1_000_000 // self.rate, "source": source, "n": n}


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows that a client was given, in the order it was given them, as columns."""

    source: Any
    n: Any
    stamped_us: Any
    received_us: Any
    stable: Any


class Watch:
    """Reads an output to the end of the run, from a thread of its own, and keeps what came."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.given: list[tuple[pa.Table, BucketInfo]] = []
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *problem: object) -> None:
        self.client.close()
        self._thread.join(10)

    def wait(self, test: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Until the test holds; it is asked again after everything that is received."""
        until = time.monotonic() + limit_s
        with self._changed:
            # Some news are empty buckets, which are not given: so it is asked now and then too.
            while not test():
                if self.failure is not None:
                    raise self.failure
                if time.monotonic() > until:
                    raise HoldfastError(f"what was waited for did not come in {limit_s:.0f} s")
                self._changed.wait(0.05)

    def infos(self, since_us: int = 0) -> list[BucketInfo]:
        return [info for _, info in self.given if info.received_at_us >= since_us]

    def rows(self) -> Seen:
        """Of the outputs whose rows are those of the sources."""
        given = [(table, info) for table, info in self.given if table.num_rows]
        counts = [table.num_rows for table, _ in given]
        table = pa.concat_tables([table for table, _ in given])
        return Seen(
            table["source"].to_numpy(),
            table["n"].to_numpy(),
            times_us(table, "ts"),
            np.repeat([info.received_at_us for _, info in given], counts),
            np.repeat([info.stability is Stability.STABLE for _, info in given], counts),
        )

    def _read(self) -> None:
        try:
            for table, info in self.client:
                with self._changed:
                    self.given.append((table, info))
                    self._changed.notify_all()
        except BaseException as err:
            with self._changed:
                self.failure = err
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, as it went: when it was caused, and when nothing was left of it."""

    stream: str
    failure_s: float
    cut_at_us: int
    healed_at_us: int
    #: When the node was first given something by the stream again: readers try now and then.
    back_at_us: int
    #: When the client had REC_DONE, or where nothing was tentative the last bucket that was late.
    over_at_us: int
    #: First and last bucket that may have been delayed.
    tentative_rows: int
    tentative_buckets: int
    missing: tuple[str, ...]

    @property
    def stabilization_ms(self) -> float:
        return (self.over_at_us - self.back_at_us) / 1_000


def fail(run: Breakable, watch: Watch, stream: str, seconds: float, *, after_s: float) -> Failure:
    """Cut the stream for so long, then wait until everything is corrected, and a while longer."""
    width_us, stop = run.network.width_us, threading.Event()
    given, before = len(watch.given), watch.client.undos
    cut_at = now_us()
    run.cut(stream)
    stop.wait(seconds)
    healed_at = now_us()
    run.heal(stream)

    def over() -> bool:
        run.raise_failure()
        known = watch.client.position
        late = [info for _, info in watch.given[given:]]
        corrected = watch.client.tentative_upto is None and (
            watch.client.undos == before or any(info.rec_done for info in late)
        )
        return corrected and known is not None and known >= healed_at // width_us

    watch.wait(over)
    infos = [info for _, info in watch.given[given:]]
    done = [info.received_at_us for info in infos if info.rec_done]
    stable = [
        info.received_at_us
        for info in infos
        if info.stability is Stability.STABLE and info.rows and info.bucket >= healed_at // width_us
    ]
    stop.wait(after_s)
    tentative = [info for info in infos if info.stability is Stability.TENTATIVE]
    return Failure(
        stream, seconds, cut_at, healed_at, run.back_at_us[stream],
        done[-1] if done else stable[0],
        sum(info.rows for info in tentative), len({info.bucket for info in tentative}),
        tuple(sorted({name for info in tentative for name in info.missing})),
    )  # fmt: skip
