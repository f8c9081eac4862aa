"""Mistakes in the log and in sources."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast.storage.manifest
from holdfast.cluster.controller import Controller
from holdfast.edge.source import Source
from holdfast.errors import StorageFull
from holdfast.storage import Log
from holdfast.storage.log_state import StreamState
from holdfast.storage.manifest import Manifest
from holdfast.storage.records import Trim
from holdfast.streams.serving import Service
from holdfast.verify.sim.simulated_disk import MemoryDisk
from tests.verify.sim.mutations.planting import mutation

# -- the log --------------------------------------------------------------------------------------


@mutation(
    "notify before the record is synced",
    "accepted",
    "wrong",
    "lost",
    "doubled",
    "alive",
    scene="torn_sources",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Manifest.open.__func__  # type: ignore[attr-defined]

    def unsynced(cls: Any, path: Any, fsync: Any, *rest: Any) -> Any:
        return original(cls, path, "never", *rest)

    patch.setattr(Manifest, "open", classmethod(unsynced))


@mutation("skip the checksum of a record", "alive", scene="torn_client")
def _(patch: pytest.MonkeyPatch) -> None:
    def unchecked(data: bytes, offset: int) -> bytes | None:
        start = offset + 8
        if start > len(data):
            return None
        length = int.from_bytes(data[offset : offset + 4], "little")
        payload = data[start : start + length]
        return payload if len(payload) == length else None

    patch.setattr(holdfast.storage.manifest, "_frame_at", unchecked)


@mutation("do not truncate a torn tail", "alive", scene="torn_nodes")
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.storage.manifest._read

    def uncut(data: bytes, path: Any) -> Any:
        records, good = original(data, path)
        return records, len(data) if good else 0

    patch.setattr(holdfast.storage.manifest, "_read", uncut)


@mutation("delete the files before the trim is recorded", "alive", scene="torn_nodes")
def _(patch: pytest.MonkeyPatch) -> None:
    def early(self: Log, stream: str, upto: int) -> None:
        if self.archive:
            return
        state = self._stream(stream)
        upto = min(upto, state.complete_upto)
        if upto > state.trimmed_upto:
            for segment in state.between(state.starts_at, upto):
                self._disk.delete(f"{self._base}/{segment.path}")
            self.append(Trim(stream, upto))

    patch.setattr(Log, "trim", early)


@mutation("record a segment before its name is synced", "alive", scene="torn_sources")
def _(patch: pytest.MonkeyPatch) -> None:
    original = MemoryDisk.put

    def unsynced(self: MemoryDisk, path: str, data: Any, *, fsync: bool) -> None:
        original(self, path, data, fsync=fsync and "segments" not in path)

    patch.setattr(MemoryDisk, "put", unsynced)


@mutation("record a checkpoint before its files are synced", "alive", scene="torn_nodes")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryDisk, "sync_tree", lambda self, path, root: None)


@mutation("trim up to the fastest consumer", "alive", "lost", scene="correction_stuck")
def _(patch: pytest.MonkeyPatch) -> None:
    def fastest(self: StreamState) -> int:
        needed = max((ack.needed for ack in self.acks.values()), default=self.starts_at - 1)
        return max(self.trimmed_upto, min(needed, self.complete_upto))

    patch.setattr(StreamState, "trimmable", property(fastest))


@mutation("trim received buckets instead of released buckets", "alive", "lost", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    def received(self: StreamState) -> int:
        needed = min((ack.received for ack in self.acks.values()), default=self.starts_at - 1)
        return max(self.trimmed_upto, min(needed, self.complete_upto))

    patch.setattr(StreamState, "trimmable", property(received))


@mutation("trim one bucket too many", "alive", "lost", "wrong", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.trimmable

    def greedy(self: Log, stream: str) -> int:
        return original(self, stream) + 1

    patch.setattr(Log, "trimmable", greedy)


@mutation("trim before every consumer has acknowledged", "alive", "lost", scene="fan_readers")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.acknowledge

    def hasty(self: Service, stream: str, *rest: Any) -> None:
        self.consumers.pop(stream, None)
        original(self, stream, *rest)

    patch.setattr(Service, "acknowledge", hasty)


@mutation("accept an older epoch", "alive", "lost", "wrong", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    acknowledge, register = Log.acknowledge, Controller.register

    def gullible(
        self: Log, stream: str, consumer: str, received: int, needed: int, epoch: int
    ) -> None:
        last = self._stream(stream).acks.get(consumer)
        acknowledge(self, stream, consumer, received, needed, max(epoch, last.epoch if last else 0))

    def welcoming(self: Controller, name: str, address: str, epoch: int, at: int = 0) -> bool:
        return register(self, name, address, 2**31, at)

    patch.setattr(Log, "acknowledge", gullible)
    patch.setattr(Controller, "register", welcoming)


# -- sources --------------------------------------------------------------------------------------


@mutation("acknowledge rows before they are written", "accepted", scene="torn_after_kill")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Source, "token", property(lambda self: self._token or self.log.token(self.name)))


@mutation("write the token without the rows of open buckets", "accepted", scene="torn_sources")
def _(patch: pytest.MonkeyPatch) -> None:
    def close(self: Source, upto: int) -> None:
        self._commit([bucket for bucket in sorted(self._pending) if bucket <= upto], upto)
        self._parts = {bucket: part for bucket, part in self._parts.items() if bucket > upto}

    patch.setattr(Source, "_close", close)


@mutation("accept the rows of a repeated push twice", "accepted", scene="source_full")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Source.push

    def twice(self: Source, data: Any, *, token: str | None = None, flush: bool = False) -> None:
        held, self._token = self._token, None
        try:
            original(self, data, token=token, flush=flush)
        finally:
            self._token = self._token or held

    patch.setattr(Source, "push", twice)


@mutation("drop rows that a full disk refused", "accepted", scene="full")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Source._commit

    def careless(self: Source, buckets: list[int], upto: int) -> None:
        try:
            original(self, buckets, upto)
        except StorageFull:
            for bucket in buckets:
                self._pending.pop(bucket, None)
            raise

    patch.setattr(Source, "_commit", careless)
