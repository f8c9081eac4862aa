"""Recorder of the events of a chaos scenario, usable from any thread."""

from __future__ import annotations

import threading

import pyarrow as pa

from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo, Client
from holdfast.verify.history import Concluded, Event, Given, Row, Stopped


class Recorder:
    """Events of the current scenario."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def take(self) -> list[Event]:
        """Return and clear the events recorded since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events


def record(client: Client, recorder: Recorder, may_read: threading.Event) -> None:
    """Record all buckets that `client` delivers until it closes. Pauses if `may_read` is unset."""

    def take(table: pa.Table, info: BucketInfo) -> None:
        may_read.wait()
        if info.rec_done:
            recorder.add(Concluded(now_us(), client.name, client.output, info.bucket))
        else:
            recorder.add(
                Given(now_us(), client.name, client.output, info.bucket, rows_of(table),
                      info.stability.value, missing=info.missing, inputs_share=info.inputs_share,
                      replaces=info.replaces)
            )  # fmt: skip

    try:
        client.foreach_bucket(take)
    except Exception as err:
        recorder.add(Stopped(now_us(), client.name, "ours", f"{type(err).__name__}: {err}"))


def rows_of(table: pa.Table) -> tuple[Row, ...]:
    """Return rows as plain values, sorted, with times in microseconds."""
    columns = [
        (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for column in table.columns
    ]
    return tuple(sorted(zip(*columns, strict=True)))
