"""Deliberate bugs, planted one at a time: what the simulator is worth.

Each is a mistake somebody could make in the code as it is, with the checkers that may report it and
the first seed that does, or a scenario written for it where it takes more of a coincidence than the
lot brings. The list is kept and grows with every protocol. A mutation that nothing catches is a
hole in the simulator, not a proof that the mistake is harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import holdfast.controller
import holdfast.core.consistency
import holdfast.core.upstream
import holdfast.log.manifest
import holdfast.performer
import holdfast.sim.engine
import holdfast.sim.follower
import holdfast.transport.service
from holdfast.carrying import Again
from holdfast.client import Client
from holdfast.controller import Controller
from holdfast.core import progress
from holdfast.core.consistency import Consistency
from holdfast.core.following import NOTHING, Following
from holdfast.core.monitor import Monitor
from holdfast.core.sunion import FOREVER, SUnion
from holdfast.core.upstream import Upstream
from holdfast.errors import StorageFull
from holdfast.inputs import Best, InputIndex
from holdfast.log import Log
from holdfast.log.manifest import Manifest
from holdfast.log.records import Added, Boundary, State, Trim, Undo
from holdfast.log.state import StreamState
from holdfast.performer import Performer
from holdfast.scenario import Fault, Scenario
from holdfast.sim.chance import scenario_of
from holdfast.sim.disk import MemoryDisk
from holdfast.sim.follower import Follower
from holdfast.sim.members import Member
from holdfast.sim.nodes import NodeProcess
from holdfast.sim.rows import Rows
from holdfast.source import Source
from holdfast.soutput import SOutput
from holdfast.transport.service import Service
from holdfast.types import OutputState, SegmentId, Stability

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    name: str
    #: Any of these may be the one that sees it.
    caught_by: tuple[str, ...]
    #: The first seed at which one of them does; 0: what is in `faults`, on a network of its own.
    seed: int
    faults: tuple[Fault, ...]
    on: str
    plant: Patch

    @property
    def scenario(self) -> Scenario:
        if self.seed:
            return scenario_of(self.seed)
        return Scenario(self.name, self.on, 20, self.faults, LOT)


S = 1_000_000
#: Decides about options: it has no checkpoints.
LOT = 1
MUTATIONS: list[Mutation] = []


def mutation(
    name: str, *caught_by: str, seed: int = 0, faults: tuple[Fault, ...] = (), on: str = "pair"
) -> Callable[[Patch], Patch]:
    def add(plant: Patch) -> Patch:
        MUTATIONS.append(Mutation(name, caught_by, seed, faults, on, plant))
        return plant

    return add


# -- the log --------------------------------------------------------------------------------------


@mutation(
    "tell before the record is synced", "accepted", "wrong", "lost", "doubled", "alive", seed=15
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Manifest.open.__func__  # type: ignore[attr-defined]

    def unsynced(cls: Any, path: Any, fsync: Any, *more: Any) -> Any:
        return original(cls, path, "never", *more)

    patch.setattr(Manifest, "open", classmethod(unsynced))


@mutation("skip the checksum of a record", "alive", seed=386)
def _(patch: pytest.MonkeyPatch) -> None:
    def unchecked(data: bytes, offset: int) -> bytes | None:
        start = offset + 8
        if start > len(data):
            return None
        length = int.from_bytes(data[offset : offset + 4], "little")
        payload = data[start : start + length]
        return payload if len(payload) == length else None

    patch.setattr(holdfast.log.manifest, "_frame_at", unchecked)


@mutation("do not cut a torn tail", "alive", seed=351)
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.log.manifest._read

    def uncut(data: bytes, path: Any) -> Any:
        records, good = original(data, path)
        return records, len(data) if good else 0

    patch.setattr(holdfast.log.manifest, "_read", uncut)


@mutation("delete the files before the record says so", "alive", seed=65)
def _(patch: pytest.MonkeyPatch) -> None:
    def early(self: Log, stream: str, upto: int) -> None:
        if self.archive:
            return
        known = self._stream(stream)
        upto = min(upto, known.complete_upto)
        if upto > known.trimmed_upto:
            for segment in known.between(known.starts_at, upto):
                self._disk.delete(f"{self._base}/{segment.path}")
            self.append(Trim(stream, upto))

    patch.setattr(Log, "trim", early)


@mutation("record a segment before its name is synced", "alive", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = MemoryDisk.put

    def unsynced(self: MemoryDisk, path: str, data: Any, *, fsync: bool) -> None:
        original(self, path, data, fsync=fsync and "segments" not in path)

    patch.setattr(MemoryDisk, "put", unsynced)


@mutation("record a checkpoint before its files are synced", "alive", seed=292)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryDisk, "sync_tree", lambda self, path, root: None)


@mutation("trim up to the fastest reader", "alive", "lost", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    def fastest(self: StreamState) -> int:
        needed = max((ack.needed for ack in self.acks.values()), default=self.starts_at - 1)
        return max(self.trimmed_upto, min(needed, self.complete_upto))

    patch.setattr(StreamState, "trimmable", property(fastest))


@mutation("trim what was received instead of what is no longer needed", "alive", "lost", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    def received(self: StreamState) -> int:
        needed = min((ack.received for ack in self.acks.values()), default=self.starts_at - 1)
        return max(self.trimmed_upto, min(needed, self.complete_upto))

    patch.setattr(StreamState, "trimmable", property(received))


@mutation("trim one bucket too many", "alive", "lost", "wrong", seed=6)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.trimmable

    def greedy(self: Log, stream: str) -> int:
        return original(self, stream) + 1

    patch.setattr(Log, "trimmable", greedy)


@mutation("trim before every reader has spoken", "alive", "lost", seed=139)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.acknowledge

    def hasty(self: Service, stream: str, *more: Any) -> None:
        self.readers.pop(stream, None)
        original(self, stream, *more)

    patch.setattr(Service, "acknowledge", hasty)


@mutation("accept an old epoch", "alive", "lost", "wrong", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    acknowledge, register = Log.acknowledge, Controller.register

    def gullible(
        self: Log, stream: str, reader: str, received: int, needed: int, epoch: int
    ) -> None:
        last = self._stream(stream).acks.get(reader)
        acknowledge(self, stream, reader, received, needed, max(epoch, last.epoch if last else 0))

    def welcoming(self: Controller, name: str, address: str, epoch: int) -> bool:
        return register(self, name, address, 2**31)

    patch.setattr(Log, "acknowledge", gullible)
    patch.setattr(Controller, "register", welcoming)


# -- sources --------------------------------------------------------------------------------------


@mutation("acknowledge rows before they are written", "accepted", seed=72)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Source, "token", property(lambda self: self._token or self.log.token(self.name)))


@mutation("write the token without the rows of open buckets", "accepted", seed=39)
def _(patch: pytest.MonkeyPatch) -> None:
    def close(self: Source, upto: int) -> None:
        self._commit([bucket for bucket in sorted(self._pending) if bucket <= upto], upto)
        self._parts = {bucket: part for bucket, part in self._parts.items() if bucket > upto}

    patch.setattr(Source, "_close", close)


@mutation("take the rows of a repeated push again", "accepted", seed=83)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Source.push

    def twice(self: Source, data: Any, *, token: str | None = None, flush: bool = False) -> None:
        held, self._token = self._token, None
        try:
            original(self, data, token=token, flush=flush)
        finally:
            self._token = self._token or held

    patch.setattr(Source, "push", twice)


@mutation("forget rows that a full disk refused", "accepted", seed=83)
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


# -- following ------------------------------------------------------------------------------------


@mutation("take a bucket twice after reconnecting", "alive", "wrong", "doubled", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    def one_less(self: Following, upto: int) -> None:
        self.at = upto if self.at is None else max(self.at, upto)

    patch.setattr(Following, "taken", one_less)


@mutation("skip a bucket when reconnecting", "wrong", "lost", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.begin

    def skipping(self: Service, stream: str, from_bucket: int | None, *more: Any) -> Any:
        begun = original(self, stream, from_bucket, *more)
        if begun is None or from_bucket is None or begun[0].upto < from_bucket:
            return begun
        first, cursor = begun
        kept = tuple(s for s in first.segments if s.id.bucket > from_bucket)
        paths = first.paths[len(first.paths) - len(kept) :]
        return replace(first, segments=kept, paths=paths), cursor

    patch.setattr(Service, "begin", skipping)


@mutation("skip the checksum of what arrives", "wrong", "lost", "alive", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.sim.follower, "verified", lambda table, segment, digest: table)


@mutation("say that a bucket is whole before it is", "alive", "wrong", "lost", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.next

    def hasty(self: Service, stream: str, cursor: Any) -> Any:
        delivery = original(self, stream, cursor)
        return delivery if delivery.ended else replace(delivery, upto=delivery.upto + 1)

    patch.setattr(Service, "next", hasty)


# -- nodes ----------------------------------------------------------------------------------------


@mutation("forget one input at a boundary", "wrong", "lost", "alive", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    def some(self: SUnion) -> int | None:
        known = [upto for upto in self.complete_upto.values() if upto is not None]
        return max(known) if len(known) == len(self.complete_upto) else None

    patch.setattr(SUnion, "whole_upto", some)


@mutation("take the first half of a delivery again", "wrong", "lost", "alive", seed=59)
def _(patch: pytest.MonkeyPatch) -> None:
    original = InputIndex.add

    def piece_by_piece(self: InputIndex, delivery: Any, time: str) -> Any:
        found = []
        for number, segment in enumerate(delivery.segments):
            tables = delivery.tables[number : number + 1]
            found += original(self, replace(delivery, segments=(segment,), tables=tables), time)
        return found

    patch.setattr(InputIndex, "add", piece_by_piece)


@mutation("give up when a peer's disk is full", "alive", seed=73)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.transport.service, "answered", lambda act: act())


@mutation("off by one in replay", "wrong", "lost", "alive", seed=10)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._from

    def late(self: Performer, stream: str) -> int | None:
        found = original(self, stream)
        return None if found is None else found + 1

    patch.setattr(Performer, "_from", late)


@mutation("forget how far windows reach back", "alive", "lost", "wrong", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._plan

    patch.setattr(Performer, "_plan", lambda self, path: replace(original(self, path), extent=0))


@mutation("need nothing that was computed", "alive", "lost", "wrong", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_needed", lambda self, path: path.position)


@mutation("say that a checkpoint is one bucket further", "wrong", "lost", "alive", seed=15)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.append

    def further(self: Log, *records: Any) -> None:
        original(
            self,
            *(replace(r, bucket=r.bucket + 1) if isinstance(r, State) else r for r in records),
        )

    patch.setattr(Log, "append", further)


@mutation("delete the state that the checkpoint refers to", "alive", "lost", "wrong", seed=234)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._finished

    def careless(self: Performer, *event: Any) -> Any:
        self._durable.clear()
        return original(self, *event)

    patch.setattr(Performer, "_finished", careless)


@mutation("go on although a full disk held up what comes first", "alive", seed=59)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.take

    def hasty(self: Performer, event: Any) -> None:
        held, self._waiting = self._waiting, deque()
        if isinstance(event, Again) and self._blocked:
            self._waiting = held
            held = deque()
        self._blocked = False
        original(self, event)
        self._waiting.extendleft(reversed(held))
        self._blocked = bool(self._waiting)

    patch.setattr(Performer, "take", hasty)


@mutation("end before the last windows are out", "lost", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Performer, "_horizon", lambda self, path, version: version.bucket)


# -- clients and the controller -------------------------------------------------------------------


@mutation("acknowledge before the position is durable", "alive", "lost", seed=140)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def hasty(self: Client, delivery: Any) -> Any:
        held, self.position = self.position, delivery.upto
        self._acknowledge()
        self.position = held
        yield from original(self, delivery)

    patch.setattr(Client, "take", hasty)


@mutation("make the position durable before the application has the rows", "lost", seed=342)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def hasty(self: Client, delivery: Any) -> Any:
        assert self._log is not None
        if delivery.info is not None:
            self._open(delivery.info)
        if delivery.upto > self._log.info(self.output).complete_upto:
            self._log.commit(self.output, [], delivery.upto)
        yield from original(self, delivery)

    patch.setattr(Client, "take", hasty)


@mutation("go on with the last bucket instead of the next", "doubled", "undone", "order", seed=18)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.__init__

    def again(self: Client, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        if self.following.at is not None:
            self.following.at -= 1

    patch.setattr(Client, "__init__", again)


@mutation("look away when a promise is broken", "reported", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Monitor, "_tick", lambda self, at, name, output: [])


@mutation("report a broken promise three buckets late", "reported", seed=1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Monitor._due_us

    def late(self: Monitor, output: Any) -> int | None:
        due = original(self, output)
        return None if due is None else due + 3 * self.width_us

    patch.setattr(Monitor, "_due_us", late)


@mutation("hand out an epoch before it is durable", "lost", "alive", "wrong", seed=194)
def _(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Controller, name: str, at_least: int = 0) -> int:
        held = self.__dict__.setdefault("held", {})
        held[name] = max(held.get(name, 0) + 1, at_least)
        return int(held[name])

    patch.setattr(Controller, "next_epoch", forgetful)


# -- results that may be wrong, and are made good -------------------------------------------------


@mutation("correct results without saying UNDO", "corrected", "order", seed=48)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def silent(self: Client, delivery: Any) -> Any:
        return (given for given in original(self, delivery) if not given[1].undo)

    patch.setattr(Client, "take", silent)


@mutation("take what is tentative for stable", "wrong", "undone", "order", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def gullible(self: Client, delivery: Any) -> Any:
        stable = tuple(replace(s, stability=Stability.STABLE) for s in delivery.segments)
        yield from original(self, replace(delivery, segments=stable))

    patch.setattr(Client, "take", gullible)


@mutation("acknowledge what is tentative", "lost", "wrong", "corrected", "alive", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    def received(self: Following, upto: int) -> None:
        self.tentative_upto = max(self.tentative_upto, upto)
        self.taken(upto)

    patch.setattr(Following, "taken_tentative", received)


@mutation("correct results from the state that has diverged", "wrong", "converge", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._finished_tentative

    def diverged(self: Performer, run: Any, event: Any, at: int) -> Any:
        if event.version is not None and self.soutput.lines.get(run.path) == run.line:
            before = self.versions[run.path].bucket
            self.versions[run.path] = replace(event.version, bucket=before)
        return original(self, run, event, at)

    patch.setattr(Performer, "_finished_tentative", diverged)


@mutation("correct results before every input is", "wrong", "alive", "converge", seed=40)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.step

    def soon(self: SUnion) -> int | None:
        upto = [self.available(stream) for stream in self.complete_upto]
        known = [bucket for bucket in upto if bucket is not None]
        return min(known) if len(known) == len(upto) else None

    def on_what_is_there(self: Performer, work: Any, version: Any) -> Any:
        held, self.inputs = self.inputs, Best(self.inputs)  # type: ignore[assignment]
        try:
            return original(self, work, version)
        finally:
            self.inputs = held

    patch.setattr(Best, "best", Best.files, raising=False)
    patch.setattr(SUnion, "whole_upto", soon)
    patch.setattr(Performer, "step", on_what_is_there)


@mutation("delete the state that a tentative run began from", "alive", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._release

    def careless(self: Performer, path: Any, **how: bool) -> None:
        held, self._tentative = self._tentative, {}
        read, self._read = self._read, {}
        original(self, path, **how)
        self._tentative, self._read = held, read

    patch.setattr(Performer, "_release", careless)


@mutation("never go on without an input", "available", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "due", lambda self, at, after, **how: after)


@mutation("hold buckets for much longer than X", "available", seed=100)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.__init__

    def patient(self: SUnion, inputs: Any, patience_us: int | None, own_us: int) -> None:
        original(self, inputs, patience_us and 8 * patience_us, 8 * own_us)

    patch.setattr(SUnion, "__init__", patient)


@mutation("never leave a failure", "lost", "corrected", "available", "alive", "bounded", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_caught_up", lambda self, path: [])


@mutation("never correct anything", "lost", "corrected", "bounded", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "corrected", lambda self, whole, stable: False)


@mutation("wait for a partner for ever", "lost", "bounded", "available", "delay", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress.handle

    def deaf(self: progress.Progress, event: Any) -> Any:
        return [] if isinstance(event, progress.Postponed) else original(self, event)

    patch.setattr(progress.Progress, "handle", deaf)


@mutation("log corrections without an UNDO", "alive", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.append

    def without(self: Log, *records: Any) -> None:
        original(self, *(record for record in records if not isinstance(record, Undo)))

    patch.setattr(Log, "append", without)


@mutation("log guesses as if they were whole", "wrong", "lost", "alive", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    def whole(self: SOutput, run: Any, results: Any) -> None:
        records: list[Any] = []
        for output, upto in run.outputs:
            for bucket, table in results[output]:
                if self.log.info(output).complete_upto < bucket <= upto:
                    id = SegmentId(output, 0, bucket)
                    records.append(Added(self.log.write(table, id, Stability.STABLE)))
            if upto > self.log.info(output).complete_upto:
                records.append(Boundary(output, upto))
        self.log.append(*records)

    patch.setattr(SOutput, "tentative", whole)


@mutation("count what is tentative as done", "wrong", "lost", "alive", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._tentative_done

    def done(self: progress.Progress, event: Any) -> Any:
        path = self.paths[event.path]
        if event.hi is not None and path.running_upto is None and path.position is not None:
            path.position = max(path.position, event.hi)
        return original(self, event)

    patch.setattr(progress.Progress, "_tentative_done", done)


@mutation("begin to wait anew with every bucket", "available", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion._arrived

    def anew(self: SUnion, stream: str, *more: Any) -> None:
        held = len(self._steps[stream])
        original(self, stream, *more)
        if len(self._steps[stream]) > held:
            del self._steps[stream][:-1]

    patch.setattr(SUnion, "_arrived", anew)


@mutation("stop a union when one of its parts is missing", "available", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    def all_of(tree: Any, upto: Any) -> int | None:
        known = list(upto.values())
        return None if None in known else min(known)

    patch.setattr(holdfast.core.consistency, "reach", all_of)


@mutation("go on with only one of the outputs", "available", seed=28)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Consistency.run

    def one(self: Consistency, hi: int) -> Any:
        outputs, missing = original(self, hi)
        return outputs[:1], missing

    patch.setattr(Consistency, "run", one)


# -- replicas -------------------------------------------------------------------------------------


@mutation("take a tentative bucket from every replica", "order", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    def young(self: Following, bucket: int) -> bool:
        return self.tentative and (self.at is None or bucket >= self.at)

    patch.setattr(Following, "is_younger", young)
    patch.setattr(
        Following, "tentative_after", property(lambda self: NOTHING if self.tentative else None)
    )


@mutation("never leave a replica that answers", "available", "delay", seed=169)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._best

    def faithful(self: Upstream) -> str | None:
        return self.main if self.main in self._known else original(self)

    patch.setattr(Upstream, "_best", faithful)


@mutation("stay with a replica that lags", "available", "delay", seed=411)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.core.upstream, "_reached", lambda heard: 0)


@mutation("acknowledge only to the replica that is read", "bounded", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Follower._say

    def one(self: Follower, server: Any, position: Any) -> Any:
        read = self.connection is not None and self.connection.server is server
        return original(self, server, position if read or not self._many else None)

    patch.setattr(Follower, "_say", one)


@mutation("rebuild without what came before", "wrong", "alive", "converge", "lost", seed=39)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._next_stable

    def short(self: progress.Progress, path: Any) -> Any:
        actions = original(self, path)
        return [
            replace(a, lo=a.rebuild_from)
            if isinstance(a, progress.Run) and a.rebuild_from is not None
            else a
            for a in actions
        ]

    patch.setattr(progress.Progress, "_next_stable", short)


@mutation("give away the inputs that rebuild the state", "wrong", "alive", "converge", seed=39)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.PathPlan, "needs_from", lambda self, bucket, referred: referred)


@mutation("checkpoint the state that has diverged", "wrong", "lost", "alive", seed=28)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._checkpoint

    def diverged(self: Performer, path: Any) -> None:
        held = self.versions[path.name]
        self.versions[path.name] = self._tentative.get(path.name, held)
        original(self, path)
        self.versions[path.name] = held

    patch.setattr(Performer, "_checkpoint", diverged)


@mutation("say nothing of tentative buckets that are empty", "available", seed=48)
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.transport.service._tentative

    def quiet(*args: Any) -> Any:
        segments, upto, missing = original(*args)
        return segments, upto if segments else None, missing

    patch.setattr(holdfast.transport.service, "_tentative", quiet)


@mutation("tell nobody how an output stands", "available", "delay", seed=169)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._perform

    def discreet(self: Performer, action: Any) -> None:
        if not isinstance(action, progress.Change):
            original(self, action)

    patch.setattr(Performer, "_perform", discreet)


@mutation("correct all replicas at once", "available", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "asked_by", lambda self, partner, me: "postponed")


@mutation("prefer a replica that guesses", "available", "delay", "lost", seed=169)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._rank

    def odd(self: Upstream, heard: Any) -> int:
        return (1, 0, 2, 3)[original(self, heard)]

    patch.setattr(Upstream, "_rank", odd)


@mutation(
    "believe a stable replica that is behind", "available", "delay",
    faults=(
        Fault(3 * S, "cut", "main<->s1,s2", 12 * S),
        Fault(3 * S, "silent", "s2", 12 * S),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._rank

    def gullible(self: Upstream, heard: Any) -> int:
        return 0 if heard.state is OutputState.STABLE else original(self, heard)

    patch.setattr(Upstream, "_rank", gullible)


@mutation(
    "hold all replicas to one epoch", "available", "lost", "delay",
    faults=(
        Fault(2 * S, "kill", "main", S // 2),
        Fault(4 * S, "kill", "main", S // 2),
        Fault(6 * S, "kill", "main@2", S // 2),
        Fault(8 * S, "kill", "main", 9 * S),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Following.refuses

    def mixed(self: Following, epoch: int, since: int, replica: str = "") -> str | None:
        return original(self, epoch, since)

    patch.setattr(Following, "refuses", mixed)


@mutation("do not wake up when X is over", "available", seed=48)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_wake", lambda self, path, after, at: [])


# -- pairs ----------------------------------------------------------------------------------------


@mutation(
    "wait for a reader that is dead", "paired",
    faults=(Fault(3 * S, "wipe", "lower.0@2", 35 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Service, "lost", lambda self, dead: None)


@mutation(
    "move the state without the results that are kept", "alive", "lost",
    faults=(
        Fault(3 * S, "kill", "egress", 11 * S),
        Fault(4 * S, "wipe", "upper.0@2", S),
        Fault(9 * S, "wipe", "upper.0", S),
    ), on="pairs-1",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.performer.describe

    def bare(log: Any, version: Any, outputs: Any) -> Any:
        moving = original(log, version, outputs)
        results = [replace(r, trimmed_upto=r.complete_upto, segments=()) for r in moving.results]
        return replace(moving, results=tuple(results))

    patch.setattr(holdfast.performer, "describe", bare)


ALONE = (Fault(3 * S, "wipe", "lower.0@2", 12 * S), Fault(9 * S, "kill", "lower.0", S))


@mutation("keep no checkpoint when alone", "alive", "lost", "wrong", faults=ALONE, on="pairs-1")
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._alone

    def careless(self: progress.Progress, alone: bool) -> Any:
        original(self, alone)
        return []

    patch.setattr(progress.Progress, "_alone", careless)
    patch.setattr(progress, "PAIR_CHECKPOINT_BUCKETS", 10_000)


@mutation("give up inputs when alone", "alive", "lost", "wrong", faults=ALONE, on="pairs-1")
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._needed

    def generous(self: progress.Progress, path: Any) -> int:
        alone, self.alone = self.alone, False
        try:
            return original(self, path)
        finally:
            self.alone = alone

    patch.setattr(progress.Progress, "_needed", generous)


@mutation(
    "declare both of a pair dead", "alive", "lost", "paired", "delay",
    faults=(Fault(5 * S, "cut", "controller<->lower.0,lower.0@2", 5 * S),), on="pairs-1",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    def harsh(partners: Any, standings: Any, hearing: Any, at: int, silence_us: int) -> list[str]:
        silent = [name for name in partners if hearing.silent(name, at, silence_us)]
        return [name for name in silent if standings[name].lives]

    patch.setattr(holdfast.controller, "lost", harsh)


@mutation(
    "stay with the copy of one's own dataflow", "available", "delay", "lost",
    faults=(Fault(3 * S, "wipe", "lower.0", 14 * S), Fault(3 * S, "wipe", "upper.0@2", 14 * S)),
    on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._best

    def faithful(self: Upstream) -> str | None:
        found = original(self)
        return found if self.home is None or found == self.home else None

    patch.setattr(Upstream, "_best", faithful)


@mutation(
    "keep what was on the disk beside what is moved", "alive", "wrong", "lost",
    faults=(Fault(3 * S, "kill", "lower.0@2", 4 * S),), on="pairs-2",
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryDisk, "wipe", lambda self: None)


@mutation("move the state of one bucket and call it the next", "wrong", "alive", "lost", seed=10)
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.performer.describe

    def ahead(log: Any, version: Any, outputs: Any) -> Any:
        moving = original(log, version, outputs)
        return replace(moving, bucket=moving.bucket + 1)

    patch.setattr(holdfast.performer, "describe", ahead)


@mutation("begin empty beside a partner that has state", "wrong", "alive", "lost", seed=10)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeProcess, "_ready", Member._ready)


@mutation("delete the state that is on its way to a partner", "alive", "lost", seed=10)
def _(patch: pytest.MonkeyPatch) -> None:
    original = NodeProcess.give

    def hasty(self: NodeProcess) -> Any:
        for path in self.fragment.paths if self.is_up else ():
            self.performer.engine.release(path, [])
        return original(self)

    patch.setattr(NodeProcess, "give", hasty)


@mutation("send a key to two partitions", "wrong", "doubled", seed=9)
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.sim.engine.belongs

    def loose(key: int, of: int) -> Any:
        class Any2(int):
            def __eq__(self, other: object) -> bool:
                return int(self) == other or (key == 3 and other == 0)

            __hash__ = int.__hash__

        return Any2(original(key, of))

    patch.setattr(holdfast.sim.engine, "belongs", loose)


# -- what only grows or only takes longer ---------------------------------------------------------


@mutation("never trim a log", "bounded", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "trim", lambda self, stream, upto: None)


@mutation("never forget an input", "bounded", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InputIndex, "forget", lambda self, stream, upto: None)


@mutation("never acknowledge an input", "bounded", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_acknowledge", lambda self, path: [])


@mutation("never acknowledge an output", "bounded", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Client, "_acknowledge", lambda self: None)


@mutation("never write a checkpoint", "bounded", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Performer, "_checkpoint", lambda self, path: None)


@mutation("wait for more than is needed", "delay", seed=3)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.whole_upto

    def cautious(self: SUnion) -> int | None:
        whole = original(self)
        return whole if whole is None or whole >= FOREVER else whole - 3

    patch.setattr(SUnion, "whole_upto", cautious)


@mutation("compute other bits in another life", "converge", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.step

    def other(self: Performer, path: Any, *more: Any) -> Any:
        run = self.engine.run

        def shifted(*args: Any, **how: Any) -> Any:
            result = run(*args, **how)
            for tables in result.outputs.values():
                for number, (bucket, table) in enumerate(tables):
                    rows = [(*row[:-1], row[-1] + self.log.epoch) for row in table.rows]
                    tables[number] = bucket, Rows(rows)
            return result

        patch.setattr(self.engine, "run", shifted)
        return original(self, path, *more)

    patch.setattr(Performer, "step", other)
    patch.setattr(SOutput, "_compare", lambda self, output, bucket, table: None)
