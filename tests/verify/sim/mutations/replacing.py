"""Mistakes in the replacement of tentative buckets, in a log and at a client; and in sources."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.source_clock import ClockAction, Read, SourceClock
from holdfast.core.watermark import Close, Watermark
from holdfast.edge import dead_letters
from holdfast.edge.client import Client
from holdfast.edge.source import Source
from holdfast.errors import LogError
from holdfast.storage import Added, Boundary, Log
from holdfast.storage.records import Undo
from tests.verify.sim.mutations.planting import mutation


@mutation("forget all tentative buckets when the first is replaced", "corrected", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def forgetful(self: Client, delivery: Any) -> Any:
        for table, info in original(self, delivery):
            yield table, info
            if info.replaces:
                self._tentative_buckets = deque([self._tentative_buckets[0]])

    patch.setattr(Client, "take", forgetful)


@mutation("report REC_DONE with the first stable bucket", "corrected", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def early(self: Client, delivery: Any) -> Any:
        for table, info in original(self, delivery):
            yield table, info
            if info.replaces:
                yield self._nothing(), replace(info, replaces=False, rows=0, rec_done=True)

    patch.setattr(Client, "take", early)


@mutation("never report REC_DONE", "corrected", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def silent(self: Client, delivery: Any) -> Any:
        return (delivered for delivered in original(self, delivery) if not delivered[1].rec_done)

    patch.setattr(Client, "take", silent)


@mutation(
    "do not record that tentative buckets are valid", "order", "corrected", scene="undoing_reader"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Client, "_note_tentative", lambda self, stream_status: None)


@mutation(
    "inherit one tentative bucket too few after a restart", "corrected", scene="client_restarts"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client._is_inherited

    patch.setattr(Client, "_is_inherited", lambda self, bucket: original(self, bucket + 1))


@mutation("inherit no tentative bucket after a restart", "corrected", scene="client_restarts")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.__init__

    def forgetful(self: Client, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._inherited = None

    patch.setattr(Client, "__init__", forgetful)


# -- the log of a node ----------------------------------------------------------------------------


@mutation(
    "make rows visible before their boundary",
    "alive",
    "lost",
    "wrong",
    "doubled",
    scene="torn_nodes",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.append

    def apart(self: Log, *records: Any) -> None:
        if any(isinstance(r, Added) for r in records) and isinstance(records[-1], Boundary):
            original(self, *(r for r in records if isinstance(r, Added)))
            records = tuple(r for r in records if not isinstance(r, Added))
        original(self, *records)

    patch.setattr(Log, "append", apart)


@mutation(
    "keep the tentative buckets of a predecessor",
    "order",
    "corrected",
    "alive",
    "available",
    scene="failure_torn",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.append

    def keeping(self: Log, *records: Any) -> None:
        original(self, *(record for record in records if not isinstance(record, Undo)))

    patch.setattr(Log, "append", keeping)


# -- sources --------------------------------------------------------------------------------------


@mutation("close the bucket that is still open", "closing", "delay", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Watermark._close_to

    def early(self: Watermark, to_us: int) -> Any:
        return original(self, to_us + self.plan.width_us)

    patch.setattr(Watermark, "_close_to", early)


@mutation("read the clock too rarely", "closing", "delay", scene="torn_nodes")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watermark, "due_in_us", lambda self: 6 * self.plan.width_us)


@mutation("close only one bucket at a time when late", "closing", "delay", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Watermark._close_to

    def one(self: Watermark, to_us: int) -> Any:
        actions = original(self, to_us)
        if self.open_us is None:
            return actions
        most = self.open_us + self.plan.width_us
        return [Close(min(a.to_us, most)) if isinstance(a, Close) else a for a in actions]

    patch.setattr(Watermark, "_close_to", one)


@mutation("remember a clock step that was undone", "closing", scene="glitches")
def _(patch: pytest.MonkeyPatch) -> None:
    original, first = SourceClock.handle, dict[SourceClock, int]()

    def handle(self: SourceClock, event: Read) -> list[ClockAction]:
        actions = original(self, event)
        for since, _ in self._offsets[:1]:
            first.setdefault(self, since)
        self._offsets = [(first[self], where) for _, where in self._offsets]
        return actions

    patch.setattr(SourceClock, "handle", handle)


@mutation("confirm a clock step ahead too early", "closing", scene="glitches")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("holdfast.core.source_clock.CONFIRM_US", 300_000)


@mutation("trim the dead letters that were just written", "accepted", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dead_letters, "KEPT_BYTES", 0)


@mutation("number dead letters only by the clock", "alive", "accepted", "lost", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.write

    def by_clock(self: Log, table: Any, id: Any, stability: Any) -> Any:
        if id.stream.endswith("-dead-letters"):
            id = replace(id, bucket=min(id.bucket, self.info(id.stream).complete_upto))
        return original(self, table, id, stability)

    patch.setattr(Log, "write", by_clock)


@mutation("drop dead letters that a full disk refused", "accepted", scene="source_full")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Source._commit

    def careless(self: Source, *args: Any) -> None:
        try:
            original(self, *args)
        except LogError:
            self._dead._rows = []
            raise

    patch.setattr(Source, "_commit", careless)
