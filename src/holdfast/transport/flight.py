"""Arrow Flight: DoExchange to follow, DoPut to push, DoGet to fetch files, actions for calls.

A followed stream is one endless exchange: after the request, only the server sends. DoGet is not
used for streams, because its client cannot interrupt the wait for the first message, and a peer may
hang at any time. The rows of a segment are sent in pieces, followed by its description; a boundary
ends a delivery. Row counts and checksums are verified on arrival.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from holdfast.errors import (
    HoldfastError,
    InputError,
    LogCorrupted,
    NotOffered,
    SetupError,
    TransportError,
)
from holdfast.model.schema import arrow_schema
from holdfast.storage import Log
from holdfast.storage.files import storage
from holdfast.storage.rows import canonical, digest
from holdfast.streams import codec
from holdfast.streams.calls import (
    Acknowledge,
    FolderMark,
    GetFolderMark,
    GetState,
    ListStreams,
    Ping,
    Request,
    call_of,
    reply_of,
)
from holdfast.streams.codec import is_inside
from holdfast.streams.delivery import Delivery, verified
from holdfast.streams.serving import Service
from holdfast.transport import wire
from holdfast.types import Segment, StreamInfo

#: A peer that sends nothing for this long is taken for dead. Used without the `silence` option.
SILENCE_S = 5.0
#: Timeout of a fetch; must be enough for the largest file.
FETCH_S = 300.0
#: Timeout of a push, whose rows may be many and are made durable before the reply.
PUSH_S = 60.0
#: Timeouts of calls that may take longer than `silence_s`. For `state`, the peer reads all files of
#: its state.
SLOW_CALLS_S = {call_of(GetState).name: 60.0}
#: Rows are sent in pieces of about this size: on a slow link, each piece counts as a heartbeat.
PIECE_BYTES = 64 * 1024
#: Before a segment with more rows is read from disk, the server sends a heartbeat.
LONG_READ_ROWS = 100_000
#: Longest wait for the server to stop: a hung consumer must not block the shutdown.
STOP_S = 5.0
_GONE = (pa.ArrowException, OSError)
R = TypeVar("R")
_log = logging.getLogger("holdfast.transport")


def sees_file(mark: FolderMark) -> bool:
    """Whether this process has the storage of a producer: on the same machine, or shared. The file
    has another content on a machine that only has the same path, or an older copy of the storage.
    """
    try:
        if not os.path.isfile(mark.file):
            return False
        with open(mark.file, "rb") as file:
            return file.read(len(mark.content) + 1) == mark.content.encode()
    except (OSError, ValueError):
        return False


_BYTES = pa.schema([("data", pa.binary())])
_PIECE_BYTES = 1 << 20


def _bytes_of(file: Any) -> Iterator[pa.RecordBatch]:
    with file:
        while data := file.read(_PIECE_BYTES):
            yield pa.record_batch([pa.array([data], pa.binary())], schema=_BYTES)


@contextmanager
def _refusals() -> Iterator[None]:
    """Send errors to the caller as errors of Holdfast. An unexpected exception is logged here in
    full; the caller receives only its type."""
    try:
        yield
    except HoldfastError as err:
        raise flight.FlightServerError(wire.error_body(err)) from None
    except pa.ArrowException:
        raise
    except Exception as err:
        _log.exception("a request failed with an internal error")
        error = TransportError(f"the server failed ({type(err).__name__}); see its log")
        raise flight.FlightServerError(wire.error_body(error)) from None


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        self._service = service
        try:
            super().__init__(f"grpc://{host}:{port}")
        except (pa.ArrowException, OSError) as err:
            raise SetupError(
                f"cannot listen on {host}:{port} ({str(err).splitlines()[0]}); is the port in use? "
                "choose another port (--port), or 0 for any free one"
            ) from None
        self.address = f"{host}:{self.port}"

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _refusals():
            ask = wire.question_of(descriptor.command, "follow", wire.Follow)
            with suppress(*_GONE):  # the consumer has disconnected
                self._serve(ask, context.is_cancelled, writer)

    def _serve(self, ask: wire.Follow, disconnected: Callable[[], bool], writer: Any) -> None:
        stream, shared = ask.stream, ask.sees

        def send(kind: str, body: dict[str, Any]) -> None:
            writer.write_metadata(pa.py_buffer(wire.encode(kind, body)))

        log = self._service.logs.get(stream)
        while log is not None and not log.has(stream):  # declared, not opened yet
            send("alive", {})
            if disconnected() or self._service.stopping.wait(self._service.heartbeat_s):
                return
        schema: pa.Schema = None
        delivery: Delivery | None = None
        for delivery in self._service.follow(
            stream, ask.from_bucket, disconnected, ask.tentative_after
        ):
            assert log is not None
            for segment, path in zip(delivery.segments, delivery.paths, strict=True):
                if not shared:
                    if schema is None:
                        schema = arrow_schema(log.info(stream).schema)
                        writer.begin(schema)
                    if len(delivery.segments) > 1 or segment.rows > LONG_READ_ROWS:
                        send("alive", {})
                    for piece in _pieces(self._rows(log, segment).cast(schema)):
                        writer.write_batch(piece)
                arrival = wire.Arrival(segment, path if shared else None)
                send("segment", codec.encode(arrival))
            send("boundary", wire.boundary_body(delivery))
        if delivery is None or not delivery.ended:
            raise TransportError(f"the server of stream {stream!r} is shutting down")

    def _rows(self, log: Log, segment: Segment) -> pa.Table:
        try:
            return log.read(segment)
        except LogCorrupted as err:
            raise self._service.damaged(segment.id.stream, err) from None

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Send an offered file in pieces."""
        with _refusals():
            name = wire.question_of(ticket.ticket, "file", wire.Fetch).name
            path = self._service.offered.get(name)
            if path is None:
                raise NotOffered(f"{name!r} is not offered here, or not any more")
            try:
                data = open(path, "rb")  # noqa: SIM115 - closed by `_bytes_of`
            except OSError as err:
                raise NotOffered(f"{name!r} can no longer be read ({err.strerror})") from None
            return flight.GeneratorStream(_BYTES, _bytes_of(data))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _refusals():
            ask = wire.question_of(descriptor.command, "push", wire.Push)
            self._service.push(ask.source, reader.read_all(), ask.token, ask.flush)

    def do_action(self, context: Any, action: Any) -> Any:
        with _refusals():
            _, body = wire.decode(action.body.to_pybytes(), action.type, error=InputError)
            reply = wire.encode("reply", self._service.answer(action.type, body))
        return iter([flight.Result(pa.py_buffer(reply))])

    def stop(self) -> None:
        self._service.stopping.set()
        ending = threading.Thread(target=self.shutdown, name="flight-stop", daemon=True)
        ending.start()
        ending.join(timeout=STOP_S)


class FlightPeer:
    """A peer reached over Flight. One connection per peer. Thread-safe.

    A call or a followed stream without an answer for `silence_s` raises `TransportError`. Pushes
    and fetches have their own timeouts.
    """

    def __init__(
        self, address: str, *, silence_s: float = SILENCE_S, by_reference: bool = True
    ) -> None:
        self.address = address
        self._silence_s, self._by_reference = silence_s, by_reference
        wait_ms = max(1, int(silence_s * 1_000))
        # No connection is shared with another peer object: a shared one may be dead, undetected.
        grpc = [("grpc.use_local_subchannel_pool", 1), ("grpc.min_reconnect_backoff_ms", wait_ms),
                ("grpc.max_reconnect_backoff_ms", wait_ms)]  # fmt: skip
        self._client = flight.FlightClient(f"grpc://{address}", generic_options=grpc)

    def streams(self) -> list[StreamInfo]:
        return list(self.call(ListStreams()).streams)

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: threading.Event,
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]:
        # These calls connect with a deadline: nothing else can interrupt connecting.
        sees = False
        if self._by_reference:
            sees = sees_file(self.call(GetFolderMark(stream)))
        else:
            self.call(Ping())
        ask = wire.Follow(stream, from_bucket, sees, tentative_after)
        try:
            writer, reader = self._client.do_exchange(
                flight.FlightDescriptor.for_command(wire.question("follow", ask))
            )
        except _GONE as err:
            raise self._error(err) from None
        patience = _Patience(reader, self._silence_s, stop)
        try:
            yield from _deliveries(patience)
        except _GONE as err:
            if stop.is_set():
                return
            if patience.lost:
                raise TransportError(
                    f"{self.address} has sent nothing for {self._silence_s:g} s"
                ) from None
            raise self._error(err) from None
        finally:
            patience.end()
            with suppress(*_GONE):
                writer.close()

    def acknowledge(
        self, stream: str, consumer: str, received: int, needed: int, epoch: int
    ) -> None:
        self.call(Acknowledge(stream, consumer, received, needed, epoch))

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        ask = wire.question("push", wire.Push(source, token, flush))
        descriptor = flight.FlightDescriptor.for_command(ask)
        try:
            limit = flight.FlightCallOptions(timeout=PUSH_S)
            writer, _ = self._client.do_put(descriptor, table.schema, limit)
            with writer:
                writer.write_table(table)
        except _GONE as err:
            raise self._error(err) from None

    def call(self, request: Request[R]) -> R:
        name = call_of(type(request)).name
        return reply_of(request, self._action(name, codec.encode(request)), self.address)

    def fetch(self, name: str, into: str) -> int:
        """Copy a file that the peer offers to the path `into`; returns its size in bytes. The name
        comes from the peer, so it is validated here."""
        if not is_inside(name):
            raise TransportError(
                f"{self.address} offers {codec.shown(name)}, expected a file inside its folder; "
                "check that the address is a Holdfast node of the same version"
            )
        limit, ask = flight.FlightCallOptions(timeout=FETCH_S), wire.Fetch(name)
        try:
            reader = self._client.do_get(flight.Ticket(wire.question("file", ask)), limit)
            with storage(into), open(into, "wb") as file:
                for piece in reader:
                    file.write(piece.data.column(0)[0].as_buffer())
                return file.tell()
        except _GONE as err:
            raise self._error(err) from None

    def close(self) -> None:
        self._client.close()

    def _action(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        action = flight.Action(name, wire.encode(name, body))
        try:
            timeout_s = max(self._silence_s, SLOW_CALLS_S.get(name, 0.0))
            options = flight.FlightCallOptions(timeout=timeout_s)
            results = list(self._client.do_action(action, options))
        except _GONE as err:
            raise self._error(err) from None
        if len(results) != 1:
            raise TransportError(f"{self.address}: expected one reply, found {len(results)}")
        return wire.decode(results[0].body.to_pybytes(), "reply")[1]

    def _error(self, err: Exception) -> HoldfastError:
        brief = str(err).splitlines()[0][:200]
        return wire.error_of(
            str(err), f"{self.address} is unreachable or closed the connection ({brief})"
        )


class _Patience:
    """Reads from an exchange. Cancels a read that received nothing for `silence_s`, or when `stop`
    is set.

    The watching thread counts ticks instead of reading a clock: a process that was suspended itself
    must not take its peer for dead when it resumes.
    """

    _TICKS = 20

    def __init__(self, reader: Any, silence_s: float, stop: threading.Event) -> None:
        self.lost = False
        self._reader, self._stop = reader, stop
        self._tick_s = silence_s / self._TICKS
        self._reading, self._quiet = False, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._thread.start()

    def read(self) -> Any:
        self._quiet, self._reading = 0, True
        try:
            return self._reader.read_chunk()
        finally:
            self._reading = False

    def end(self) -> None:
        self._over.set()
        self._reader.cancel()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._tick_s):
            self._quiet += self._reading
            if self._stop.is_set() or self._quiet > self._TICKS:
                self.lost = not self._stop.is_set()
                self._reader.cancel()
                return


def _deliveries(patience: _Patience) -> Iterator[Delivery]:
    segments: list[Segment] = []
    paths: list[str] = []
    tables: list[pa.Table] = []
    pieces: list[pa.RecordBatch] = []
    while True:
        try:
            chunk = patience.read()
        except StopIteration:
            return
        if chunk.data is not None:
            pieces.append(chunk.data)
            continue
        kind, body = wire.decode(bytes(chunk.app_metadata), "alive", "segment", "boundary")
        match kind:
            case "segment":
                arrival = wire.arrival_of(body)
                segment = arrival.segment
                segments.append(segment)
                if arrival.path is not None:
                    paths.append(arrival.path)
                else:
                    table = canonical(pa.Table.from_batches(pieces))
                    tables.append(verified(table, segment, digest))
                    pieces = []
            case "boundary":
                yield wire.delivery_of(body, segments, paths, tables)
                segments, paths, tables = [], [], []


def _pieces(table: pa.Table) -> list[pa.RecordBatch]:
    rows = max(1, table.num_rows * PIECE_BYTES // max(1, table.nbytes))
    pieces: list[pa.RecordBatch] = table.to_batches(max_chunksize=rows)
    return pieces
