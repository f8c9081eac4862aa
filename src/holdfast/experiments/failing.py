"""Injected failures of an input stream, and what a client of the network received (Borealis
section 5).

The network has three sources, an SUnion, a stage with some state, and an output. The rows of a
source depend only on time, so the expected rows need not be recorded. The connection between one
source and the node is cut. The source continues, and the missed rows are delivered when the
connection is restored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo, Client
from holdfast.errors import HoldfastError, TransportError
from holdfast.runtime.running import Run
from holdfast.storage.rows import times_us
from holdfast.streams.delivery import Delivery, Peer
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess
from holdfast.types import Stability

#: The stream that is cut. Delays are measured on rows of the two other streams.
CUT = "s3"
BUCKET_MS = 100
#: Share of `max_delay` (X in Borealis) that is spent on waiting, as in the paper.
ALPHA = 0.9
#: Deadline for a correction, in seconds.
LIMIT_S = 120.0
#: Warm-up in seconds: of the first run, whose JVM is cold, and of later runs, with a new plan.
WARM_S, WARM_AGAIN_S = 20.0, 3.0
#: Effects of a failure are measured until this long after its correction, in seconds.
AFTER_S = 2.0


class Breakable(Run):
    """A local run whose connections to the nodes can be cut, stream by stream."""

    def __init__(self, network: hf.Network, **how: Any) -> None:
        super().__init__(network, **how)
        self._cut: set[str] = set()
        #: Time of the first delivery since a connection was opened or restored, by stream.
        self.back_at_us: dict[str, int] = {}

    def cut(self, stream: str) -> None:
        self._cut.add(stream)

    def heal(self, stream: str) -> None:
        self.back_at_us.pop(stream, None)
        self._cut.discard(stream)

    def through(self, stream: str) -> None:
        """Raise TransportError while the stream is cut."""
        if stream in self._cut:
            raise TransportError(f"the connection to {stream!r} is cut")

    def peer_of(self, stream: str, consumer: str, producer: str) -> Peer:
        self.through(stream)
        return _Line(self, stream)


class _Line(InProcess):
    """A peer at the other end of a connection that can be cut."""

    def __init__(self, run: Breakable, stream: str) -> None:
        super().__init__(run.service)
        self._run, self._stream = run, stream

    def follow(self, *args: Any, **options: Any) -> Iterator[Delivery]:
        for delivery in super().follow(*args, **options):
            self._run.through(self._stream)
            self._run.back_at_us.setdefault(self._stream, now_us())
            yield delivery

    def _open(self) -> Service:
        self._run.through(self._stream)
        return super()._open()


# -- generated rows -------------------------------------------------------------------------------


class Numbered:
    """Generator of the rows of one source, `rate` rows per second.

    Row `n` is stamped n / rate seconds after 1970, so its number determines when it is due.
    """

    def __init__(self, source: int, rate: int) -> None:
        self.source, self.rate = source, rate
        #: The first row number that was generated.
        self.since: int | None = None

    def due(self, at_us: int) -> int:
        """Return the first row number stamped at this time or later."""
        return -(-at_us * self.rate // 1_000_000)

    def __call__(self, number: int, from_us: int, to_us: int) -> dict[str, Any]:
        n = np.arange(self.due(from_us), self.due(to_us))
        if self.since is None:
            self.since = self.due(from_us)
        source = np.full(len(n), self.source, np.int32)
        return {"ts": n * 1_000_000 // self.rate, "source": source, "n": n}


def joined(rows: hf.Stream, rate: int, state_rows: int) -> hf.Stream:
    """Join every row with itself: the rows stay the same, and the join holds `state_rows` rows as
    its state, as the SJoin of the paper does."""
    within_ms = max(1, round(1_000 * state_rows / rate))
    return rows.join(rows.filter("n >= 0"), on=["source", "n"], within=f"{within_ms}ms")


def merging(
    rate: int,
    *,
    bucket_ms: int = BUCKET_MS,
    join_rows: int | None = None,
    joins: int = 1,
    window_ms: int | None = None,
    **protection: Any,
) -> tuple[hf.Network, list[Numbered]]:
    """Build a union of three sources with `rate` rows per second in total.

    Output `merged` gives all rows unchanged. If `join_rows` is given, the rows pass `joins` joins
    in series, which together hold that many rows as their state. If `window_ms` is given, output
    `counts` of the same path holds that many milliseconds of rows as state.
    """
    net = hf.Network("failing", bucket=f"{bucket_ms}ms")
    generators = [Numbered(number, rate // 3) for number in (1, 2, 3)]
    sources = [
        net.source(
            f"s{rows.source}", "ts timestamp, source int, n long", time="ts", feed=hf.Generate(rows)
        )
        for rows in generators
    ]
    merged = rows_out = net.union(*sources).filter("n >= 0")
    for _ in range(joins if join_rows else 0):
        rows_out = joined(rows_out, rate, (join_rows or 0) // joins)
    net.output("merged", rows_out)
    if window_ms is not None:
        window = merged.map("ts", key="n % 100").window(
            f"{window_ms}ms", slide=f"{min(window_ms, 1_000)}ms"
        )
        net.output("counts", window.group_by("key").agg(n=hf.count()))
    net.protect("main", wait_share=ALPHA, **protection)
    return net, generators


# -- received rows --------------------------------------------------------------------------------


class Watch:
    """Reads an output in its own thread until the end of the run, and records all deliveries."""

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
        """Wait until `test` holds. It is evaluated again after every delivery."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            # Empty buckets advance the position without a delivery, so the test is also polled.
            while not test():
                if self.failure is not None:
                    raise self.failure
                if time.monotonic() > deadline:
                    raise HoldfastError(
                        f"timed out after {limit_s:.0f} s waiting for the results of a client"
                    )
                self._changed.wait(0.05)

    def infos(self) -> list[BucketInfo]:
        return [info for _, info in self.given]

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


class Seen:
    """The rows of `merged` that a client received, as columns, in order of arrival."""

    def __init__(self, watch: Watch) -> None:
        deliveries = [(table, info) for table, info in list(watch.given) if table.num_rows]
        counts = [table.num_rows for table, _ in deliveries]
        table = pa.concat_tables([table for table, _ in deliveries])
        self.source, self.n = table["source"].to_numpy(), table["n"].to_numpy()
        received_us = np.repeat([info.received_at_us for _, info in deliveries], counts)
        self.stable = np.repeat(
            [info.stability is Stability.STABLE for _, info in deliveries], counts
        )
        #: Positions of new rows: rows not delivered before, neither as stable nor as
        #: tentative.
        self.new = np.unique(4 * self.n + self.source, return_index=True)[1]
        self.new_source, self.new_at_us = self.source[self.new], received_us[self.new]
        self.new_delay_ms = (self.new_at_us - times_us(table, "ts")[self.new]) / 1_000

    def delay_new_ms(self, since_us: int, until_us: int) -> float:
        """Delay_new (section 2.3): the longest time from the stamp of a row to its first delivery.

        Covers rows that were new in this interval, of the streams that were not cut.
        """
        new = (self.new_at_us >= since_us) & (self.new_at_us <= until_us)
        return float(self.new_delay_ms[new & (self.new_source != int(CUT[1:]))].max())

    def delays_ms(self, since_us: int, until_us: int) -> Any:
        """Delays of all rows that were new in this interval, as an array."""
        return self.new_delay_ms[(self.new_at_us >= since_us) & (self.new_at_us <= until_us)]

    def lossless(self, made: Sequence[Numbered], since_us: int, until_us: int) -> bool:
        """Whether each row stamped in this interval was delivered as stable exactly once."""
        for rows in made:
            assert rows.since is not None
            due = np.arange(max(rows.since, rows.due(since_us)), rows.due(until_us))
            received = self.n[self.stable & (self.source == rows.source)]
            received = np.sort(
                received[(received >= rows.due(since_us)) & (received < rows.due(until_us))]
            )
            if not np.array_equal(received, due):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Failure:
    """Timeline of one failure."""

    failure_s: float
    cut_at_us: int
    healed_at_us: int
    #: When the node received the stream again. It retries at least every 0.4 s.
    back_at_us: int
    #: When the client received REC_DONE, or its first timely bucket if nothing was tentative.
    over_at_us: int
    tentative_rows: int

    @property
    def until_us(self) -> int:
        """End of the interval in which effects of the failure are measured."""
        return self.over_at_us + int(AFTER_S * 1e6)

    @property
    def missing_s(self) -> float:
        """How long the stream was missing at the node."""
        return (self.back_at_us - self.cut_at_us) / 1e6

    @property
    def stabilization_ms(self) -> float:
        """Time from the return of the stream at the node to REC_DONE at the client."""
        return (self.over_at_us - self.back_at_us) / 1_000


def fail(run: Breakable, watch: Watch, seconds: float) -> Failure:
    """Cut the stream for `seconds`, then wait for the correction and `AFTER_S` longer."""
    width_us, pause = run.network.width_us, threading.Event()
    before = len(watch.given)
    cut_at = now_us()
    run.cut(CUT)
    pause.wait(seconds)
    healed_at = now_us()
    run.heal(CUT)

    def over() -> bool:
        """Stable again, up to a bucket after the end of the cut."""
        run.raise_failure()
        client = watch.client
        if client.tentative_upto is not None or client.position is None:
            return False
        return client.position > healed_at // width_us

    watch.wait(over)
    infos = [info for _, info in watch.given[before:]]
    done = [info.received_at_us for info in infos if info.rec_done]
    in_time = [
        info.received_at_us
        for info in infos
        if info.rows and info.stability is Stability.STABLE
        if info.bucket >= healed_at // width_us
    ]
    failure = Failure(
        seconds, cut_at, healed_at, run.back_at_us[CUT], done[-1] if done else in_time[0],
        sum(info.rows for info in infos if info.stability is Stability.TENTATIVE),
    )  # fmt: skip
    pause.wait(max(0.0, (failure.until_us - now_us()) / 1e6))
    last = now_us() // width_us
    watch.wait(lambda: watch.client.position is not None and watch.client.position >= last)
    return failure


def failures(
    network: hf.Network, seconds: Sequence[float], *, warm_s: float,
    said: Callable[[Failure], None] = lambda failure: None,
) -> tuple[list[Failure], Seen]:  # fmt: skip
    """Inject failures one after the other in one run, and return what the client received."""
    measured: list[Failure] = []
    run = Breakable(network, options=hf.Options(archive=False))
    with run, ExitStack() as stack:
        watches = {
            op.name: stack.enter_context(Watch(run.client(op.name, tentative=True)))
            for op in network.outputs
        }
        watch = watches["merged"]
        watch.wait(lambda: watch.client.position is not None)
        threading.Event().wait(warm_s)
        for failure_s in seconds:
            measured.append(fail(run, watch, failure_s))
            said(measured[-1])
        seen = Seen(watch)
    return measured, seen
