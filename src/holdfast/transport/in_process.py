"""The in-process transport: the interface of the Flight transport without a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import pyarrow as pa

from holdfast.errors import TransportError
from holdfast.streams import codec
from holdfast.streams.calls import Request, call_of, reply_of
from holdfast.streams.delivery import Delivery
from holdfast.streams.serving import Service
from holdfast.types import StreamInfo

R = TypeVar("R")


class InProcess:
    """A peer in the same process: the same replies as over Flight, without copying rows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._closed = False

    def streams(self) -> list[StreamInfo]:
        return self._open().streams()

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: threading.Event,
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]:
        yield from self._open().follow(
            stream, from_bucket, lambda: stop.is_set() or self._closed, tentative_after
        )

    def acknowledge(
        self, stream: str, consumer: str, received: int, needed: int, epoch: int
    ) -> None:
        self._open().acknowledge(stream, consumer, received, needed, epoch)

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        self._open().push(source, table, token, flush)

    def call(self, request: Request[R]) -> R:
        name = call_of(type(request)).name
        return reply_of(request, self._action(name, codec.encode(request)), "this process")

    def close(self) -> None:
        self._closed = True

    def _action(self, name: str, body: Any) -> dict[str, Any]:
        return self._open().answer(name, body)

    def _open(self) -> Service:
        if self._closed or self._service.stopping.is_set():
            raise TransportError("the connection to the server is closed")
        return self._service
