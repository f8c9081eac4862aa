"""Arrow Flight: one server per process, DoGet to follow, DoPut to push, actions for the rest.

A followed stream is one endless DoGet. Each segment comes as one record batch with its description
as metadata; a boundary is an empty batch. Counts and checksums are verified on arrival.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from holdfast.errors import HoldfastError, SetupError, TransportError
from holdfast.log.rows import canonical, digest
from holdfast.model.schema import arrow_schema
from holdfast.transport import wire
from holdfast.transport.service import Delivery, Service
from holdfast.types import Segment, StreamInfo

#: A peer that has not said anything for so long is taken for dead by its readers.
SILENCE_S = 5.0


def machine_id() -> str:
    """Equal for processes that see the same file systems at the same paths."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    try:
        namespace = os.readlink("/proc/self/ns/mnt")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        self._service = service
        try:
            super().__init__(f"grpc://{host}:{port}")
        except (pa.ArrowException, OSError) as err:
            raise SetupError(
                f"cannot listen on {host}:{port} ({str(err).splitlines()[0]}); is the port in use? "
                "choose another with --port, or 0 for any free one"
            ) from None
        self.address = f"{host}:{self.port}"

    def do_get(self, context: Any, ticket: Any) -> Any:
        try:
            ask = wire.decode(ticket.ticket, "follow")
            shared = ask["machine"] == machine_id()
            deliveries = self._service.follow(
                ask["stream"], ask["from_bucket"], context.is_cancelled
            )
            first = next(deliveries, None)
            log = self._service.logs[ask["stream"]]
            if first is None:
                raise TransportError(f"stream {ask['stream']!r} is closing")
            schema = arrow_schema(log.info(ask["stream"]).schema)
        except HoldfastError as err:
            raise flight.FlightServerError(wire.error_body(err)) from None
        return flight.GeneratorStream(schema, self._batches(first, deliveries, log, schema, shared))

    def _batches(
        self, first: Delivery, rest: Iterator[Delivery], log: Any, schema: pa.Schema, shared: bool
    ) -> Iterator[Any]:
        empty = pa.RecordBatch.from_arrays(
            [pa.array([], field.type) for field in schema], schema=schema
        )
        delivery: Delivery | None = first
        try:
            while delivery is not None:
                for segment, path in zip(delivery.segments, delivery.paths, strict=True):
                    body = {"segment": wire.segment_body(segment), "path": path if shared else None}
                    batch = empty
                    if not shared:
                        batch = log.read(segment).cast(schema).combine_chunks().to_batches()[0]
                    yield batch, pa.py_buffer(wire.encode("segment", body))
                said = {"stream": delivery.stream, "upto": delivery.upto, "epoch": delivery.epoch,
                        "ended": delivery.ended}  # fmt: skip
                yield empty, pa.py_buffer(wire.encode("boundary", said))
                delivery = next(rest, None)
        except HoldfastError as err:
            raise flight.FlightServerError(wire.error_body(err)) from None

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        try:
            ask = wire.decode(descriptor.command, "push")
            table = reader.read_all()
            self._service.push(ask["source"], table, ask["token"], ask["flush"])
        except HoldfastError as err:
            raise flight.FlightServerError(wire.error_body(err)) from None

    def do_action(self, context: Any, action: Any) -> Any:
        try:
            body = wire.decode(action.body.to_pybytes(), action.type)
            match action.type:
                case "streams":
                    infos = [asdict(info) for info in self._service.streams()]
                    answer: dict[str, Any] = {"streams": infos}
                case "acknowledge":
                    self._service.acknowledge(
                        body["stream"], body["reader"], body["received"], body["needed"],
                        body["epoch"],
                    )  # fmt: skip
                    answer = {}
                case _:
                    answer = self._service.call(action.type, body)
        except HoldfastError as err:
            raise flight.FlightServerError(wire.error_body(err)) from None
        return iter([flight.Result(pa.py_buffer(wire.encode("answer", answer)))])

    def stop(self) -> None:
        self._service.stopping.set()
        self.shutdown()


class FlightPeer:
    """A peer reached over Flight. One connection per peer; safe to use from several threads."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client = flight.FlightClient(f"grpc://{address}")

    def streams(self) -> list[StreamInfo]:
        return [wire.info_of(body) for body in self._action("streams", {})["streams"]]

    def follow(
        self, stream: str, from_bucket: int | None, stop: threading.Event
    ) -> Iterator[Delivery]:
        ask = {"stream": stream, "from_bucket": from_bucket, "machine": machine_id()}
        try:
            reader = self._client.do_get(flight.Ticket(wire.encode("follow", ask)))
            segments: list[Segment] = []
            paths: list[str] = []
            tables: list[pa.Table] = []
            while not stop.is_set():
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return
                data = bytes(chunk.app_metadata)
                if b'"kind":"segment"' in data:
                    body = wire.decode(data, "segment")
                    segment = wire.segment_of(body["segment"])
                    segments.append(segment)
                    if body["path"] is not None:
                        paths.append(body["path"])
                    else:
                        tables.append(_verified(pa.Table.from_batches([chunk.data]), segment))
                    continue
                said = wire.decode(data, "boundary")
                yield Delivery(
                    said["stream"], said["upto"], said["epoch"], tuple(segments), tuple(paths),
                    tuple(tables), said["ended"],
                )  # fmt: skip
                segments, paths, tables = [], [], []
            reader.cancel()
        except (pa.ArrowException, OSError) as err:
            raise self._error(err) from None

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        self._action(
            "acknowledge",
            {"stream": stream, "reader": reader, "received": received, "needed": needed,
             "epoch": epoch},
        )  # fmt: skip

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        ask = {"source": source, "token": token, "flush": flush}
        descriptor = flight.FlightDescriptor.for_command(wire.encode("push", ask))
        try:
            writer, _ = self._client.do_put(descriptor, table.schema)
            with writer:
                writer.write_table(table)
        except (pa.ArrowException, OSError) as err:
            raise self._error(err) from None

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._action(name, body)

    def close(self) -> None:
        self._client.close()

    def _action(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        action = flight.Action(name, wire.encode(name, body))
        try:
            options = flight.FlightCallOptions(timeout=SILENCE_S)
            results = list(self._client.do_action(action, options))
        except (pa.ArrowException, OSError) as err:
            raise self._error(err) from None
        return wire.decode(results[0].body.to_pybytes(), "answer")

    def _error(self, err: Exception) -> HoldfastError:
        brief = str(err).splitlines()[0][:200]
        return wire.error_of(str(err), f"{self.address} cannot be reached or went away ({brief})")


def _verified(table: pa.Table, segment: Segment) -> pa.Table:
    table = canonical(table)
    if table.num_rows != segment.rows or digest(table) != segment.checksum:
        raise TransportError(f"segment {segment.id} arrived damaged; it will be asked for again")
    return table
