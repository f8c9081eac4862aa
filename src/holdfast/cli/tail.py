"""`holdfast tail`: follows a stream from another terminal, also across failures of its producer.

`tail` is not a registered consumer, so producers retain nothing for it. Buckets that were deleted
before `tail` could show them are reported as missing.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import pyarrow as pa

from holdfast.cli.find import ask, is_running, running
from holdfast.clock import monotonic_us
from holdfast.edge.client import RETRY_S, BucketInfo, Client
from holdfast.errors import InputError, SetupError, TransportError, Trimmed
from holdfast.streams.calls import GetProducers, Locate
from holdfast.streams.subscribing import Connections, Subscriber
from holdfast.transport.flight import FlightPeer

#: `tail` gives up when it has received nothing for this long.
GONE_S = 60.0
#: Pause between two attempts to find a stream that has not begun.
WAIT_S = 0.3
#: Placeholder for the bucket width, which only delays need; `tail` shows no delays.
NO_WIDTH = 0


def tail(storage: str, stream: str, as_json: bool, buckets: int | None, oldest: bool) -> int:
    producers = _producers(storage, stream)
    newest = _newest(storage, producers, stream)
    seen = 0
    start = None if oldest or newest is None else newest + 1
    for table, info in _Looking(storage, stream, producers, start):
        for row in table.to_pylist():
            print(_line(info, row, as_json), flush=True)
        if info.replaces and not info.rows:
            line = _line(info, {"rows": 0}, True) if as_json else f"{info.bucket} STABLE no rows"
            print(line, flush=True)
        seen += not info.rec_done
        if buckets is not None and seen >= buckets:
            return 0
    return 0


class _Looking:
    """Iterates over the buckets of a stream until the stream or the run ends."""

    def __init__(
        self, storage: str, stream: str, producers: Connections, start: int | None
    ) -> None:
        self._storage, self._stream, self._producers = storage, stream, producers
        # The client has no producers, so it sends no acknowledgements.
        self._client = Client(stream, {}, NO_WIDTH, from_bucket=start, tentative=True)
        self._subscriber: Subscriber | None = None
        self._began_us = monotonic_us()
        self._stop = threading.Event()
        self._over: SetupError | None = None
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def __iter__(self) -> Iterator[tuple[pa.Table, BucketInfo]]:
        oldest = False
        while not (self._stop.is_set() or self._client.ended):
            subscription = self._client.subscription(tuple(self._producers))
            wanted = subscription.at
            subscription.at = None if oldest else wanted
            self._subscriber = Subscriber(
                self._stream, "tail", subscription, self._producers, self._stop
            )
            try:
                for delivery in self._subscriber.deliveries():
                    if wanted is not None and wanted < delivery.since:
                        last = delivery.since - 1
                        print(f"buckets {wanted} to {last} were deleted before they could be shown",
                              file=sys.stderr, flush=True)  # fmt: skip
                    wanted, oldest = None, False
                    yield from self._client.take(delivery)
            except Trimmed:
                oldest = True
            except TransportError:  # a file was deleted meanwhile
                self._stop.wait(RETRY_S)
        if self._over is not None:
            raise self._over

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            if not is_running(self._storage):
                self._over = SetupError(
                    f"no run is using {self._storage} any more; start it again with `holdfast run`"
                )
            subscriber = self._subscriber
            last_heartbeat_us = self._began_us if subscriber is None else subscriber.heard_us
            if monotonic_us() - last_heartbeat_us > 1e6 * GONE_S:
                self._over = SetupError(
                    f"no heartbeat from {self._stream!r} for {GONE_S:.0f} s; see `holdfast status`"
                )
            if self._over is not None:
                self._stop.set()


def _producers(storage: str, stream: str) -> Connections:
    """Connections to the producers of a stream. Sources, and in a local run all streams, are in the
    process of the run."""
    producers = ask(storage, GetProducers(stream))
    if not producers.known:
        outputs = ", ".join(producers.outputs) or "none"
        raise InputError(f"there is no output {stream!r} (outputs: {outputs})")
    return {name: partial(_connect, storage, name) for name in producers.names} or {
        stream: partial(running, storage)
    }


def _connect(storage: str, producer: str) -> FlightPeer:
    address = running(storage).call(Locate(producer)).address
    if address is None:
        raise TransportError(f"node {producer!r} has not reported yet")
    return FlightPeer(address)


def _newest(storage: str, producers: Connections, stream: str) -> int | None:
    """The last complete bucket of the stream; None if the stream begins now, because the run is
    starting."""
    waited = False
    last_answer_us = monotonic_us()
    while (newest := _found(producers, stream)) is None:
        if not waited:
            print(f"waiting for {stream!r}: the run is starting", file=sys.stderr, flush=True)
        waited = True
        threading.Event().wait(WAIT_S)
        with suppress(TransportError):
            running(storage).call(GetProducers(stream))  # raises if the run has stopped
            last_answer_us = monotonic_us()
        if monotonic_us() - last_answer_us > 1e6 * GONE_S:
            raise SetupError(
                f"no answer from the run on {storage} for {GONE_S:.0f} s; see `holdfast status`"
            )
    return None if waited else newest


def _found(producers: Connections, stream: str) -> int | None:
    for connect in producers.values():
        with suppress(TransportError):
            for info in connect().streams():
                if info.name == stream:
                    return info.complete_upto
    return None


def _line(info: BucketInfo, row: dict[str, Any], as_json: bool) -> str:
    shown = {k: str(v) if isinstance(v, datetime) else v for k, v in row.items()}
    if as_json:
        body = {"bucket": info.bucket, "stability": info.stability.value}
        return json.dumps({**body, **shown}, default=str)
    text = "  ".join(f"{key}={value}" for key, value in shown.items())
    return f"{info.bucket} {info.stability.value} {text}"
