"""A node: one process part that runs a fragment. One queue, one loop; the core decides.

Threads only carry: one follows each input, one per path runs Spark jobs, the loop performs the
core's actions in order. What the node logs, others follow; what it no longer needs, it says
upstream."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.config import Options
from holdfast.core import progress as core
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import InputFile
from holdfast.engine.state import Version, check_files
from holdfast.errors import (
    HoldfastError,
    LogError,
    NotDeterministic,
    ProtocolViolation,
    TransportError,
)
from holdfast.log import Added, Boundary, Ended, Log
from holdfast.log.rows import digest
from holdfast.log.segment import write_segment
from holdfast.model.fragments import Fragment, Path
from holdfast.source import now_us
from holdfast.transport.service import Delivery, Peer, Service
from holdfast.types import SegmentId, Stability

_log = logging.getLogger("holdfast.node")
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class _Delivered:
    delivery: Delivery
    info: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Finished:
    path: str
    version: Version | None
    seconds: float
    error: BaseException | None = None


class InputIndex:
    """Where the rows of the inputs are, by bucket. Grows with what is retained, not with time."""

    def __init__(self, folder: str) -> None:
        #: Rows that came over the network without shared storage are put here; a cache.
        self.folder = folder
        self._files: dict[str, list[InputFile]] = {}
        self._lock = threading.Lock()

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        with self._lock:
            held = self._files.get(stream, [])
            return held[bisect_left(held, lo, key=_bucket) : bisect_right(held, hi, key=_bucket)]

    def add(self, delivery: Delivery, time: str) -> list[tuple[int, int]]:
        """Bucket and rows of each segment that is new."""
        found = []
        for number, segment in enumerate(delivery.segments):
            if delivery.tables:
                name = f"{segment.id.bucket}.{segment.id.version}.{segment.id.part}.parquet"
                path = os.path.join(self.folder, delivery.stream, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write_segment(delivery.tables[number], path, time=time, fsync=False)
            else:
                path = delivery.paths[number]
            file = InputFile(segment.id.bucket, path, segment.rows)
            with self._lock:
                insort(self._files.setdefault(delivery.stream, []), file, key=_bucket)
            found.append((file.bucket, file.rows))
        return found

    def forget(self, stream: str, upto: int) -> None:
        with self._lock:
            held = self._files.get(stream, [])
            gone, self._files[stream] = (
                held[: bisect_right(held, upto, key=_bucket)],
                held[bisect_right(held, upto, key=_bucket) :],
            )
        for file in gone:
            if file.path.startswith(self.folder):
                os.unlink(file.path)


def _bucket(file: InputFile) -> int:
    return file.bucket


class Node:
    """Runs `fragment`; reads each input from the peer that `upstream` connects to."""

    def __init__(
        self,
        name: str,
        fragment: Fragment,
        engine: Engine,
        log: Log,
        service: Service,
        upstream: Mapping[str, Callable[[], Peer]],
        options: Options,
    ) -> None:
        self.name, self.fragment, self.engine, self.log = name, fragment, engine, log
        self.service, self.upstream, self.options = service, upstream, options
        self.width_us = engine.network.width_us
        self.paths = {path.name: path for path in fragment.paths}
        self.inputs = InputIndex(os.path.join(str(log.root), "inputs"))
        shutil.rmtree(self.inputs.folder, ignore_errors=True)
        self.versions: dict[str, Version] = {}
        self._durable: dict[str, Version] = {}
        self._valid_from: dict[str, int] = {}
        #: What ended the node, if anything did.
        self.failure: BaseException | None = None
        self.steps = 0
        self.jobs = 0
        self.step_seconds: list[float] = []
        self._events: queue.Queue[_Delivered | _Finished | core.Event | None] = queue.Queue()
        self._stop = threading.Event()
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._peers: dict[str, Peer] = {}
        self._workers = ThreadPoolExecutor(max(1, len(self.paths)), "step")
        self.core = core.Progress(
            [self._plan(path) for path in fragment.paths],
            resumed=self._recover(),
            recovery=options.recovery,
            checkpoint_buckets=options.checkpoint_buckets,
            group_buckets_max=options.group_buckets_max,
            group_rows_max=options.group_rows_max,
        )
        for output in fragment.outputs:
            service.logs[output] = log
        service.on_ack.append(self._on_ack)

    def start(self) -> None:
        self._thread(self._loop, "node")
        for stream in self.fragment.inputs:
            self._thread(partial(self._follow, stream), f"follow-{stream}")

    def stop(self) -> None:
        self._stop.set()
        self._events.put(None)
        for thread in self._threads:
            thread.join(timeout=30)
        self._workers.shutdown(wait=True)

    def status(self) -> dict[str, Any]:
        recent = self.step_seconds[-100:]
        return {
            "node": self.name,
            "fragment": self.fragment.name,
            "epoch": self.log.epoch,
            "failure": str(self.failure) if self.failure else None,
            "steps": self.steps,
            "jobs": self.jobs,
            "step_ms": round(1_000 * sorted(recent)[len(recent) // 2], 1) if recent else None,
            "paths": {
                name: {
                    "position": state.position,
                    "whole_upto": state.sunion.whole_upto(),
                    "waiting_for": state.sunion.waiting_for(),
                    "state_rows": self.versions[name].rows() if name in self.versions else 0,
                    "checkpoint": state.durable[0] if state.durable else None,
                    "convergent": state.plan.convergent,
                }
                for name, state in self.core.paths.items()
            },
        }

    # -- recovery -------------------------------------------------------------------------------

    def _plan(self, path: Path) -> core.PathPlan:
        stateful = sum(op.stateful for op in path.operators)
        extent = -(-path.extent_us() // self.width_us) + stateful
        return core.PathPlan(path.name, path.inputs, path.outputs, path.convergent, extent)

    def _recover(self) -> dict[str, tuple[int, int]]:
        """The newest durable version of each path whose files are all there."""
        found: dict[str, tuple[int, int]] = {}
        for path in self.fragment.paths:
            plan = self.engine.plan_hash(path)
            for bucket, body in reversed(self.log.states(path.name)):
                version = Version.of(path.name, bucket, body)
                if version.plan != plan:
                    raise HoldfastError(
                        f"the storage of node {self.name!r} holds the state of another query (path "
                        f"{path.name!r}); use another --storage, or delete it to start afresh"
                    )
                try:
                    check_files(version, self.engine.folder)
                except LogError as err:
                    _log.warning("node %s: checkpoint at bucket %s unusable: %s",
                                 self.name, bucket, err)  # fmt: skip
                    continue
                self.versions[path.name] = self._durable[path.name] = version
                found[path.name] = (bucket, version.needs_from)
                break
        self.engine.recovered(list(self.versions.values()))
        return found

    # -- threads that carry ---------------------------------------------------------------------

    def _thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"{self.name}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, stream: str) -> None:
        """Follow an input for ever: after a failure, from the bucket after the last received."""
        readers = [p.name for p in self.fragment.paths if stream in p.inputs]
        resumed = [self.versions[name].needs_from for name in readers if name in self.versions]
        at = min(resumed) if len(resumed) == len(readers) else None
        told = False
        while not self._stop.is_set():
            try:
                peer = self.upstream[stream]()
                self._peers[stream] = peer
                for delivery in peer.follow(stream, at, self._stop):
                    opened = None
                    if not told:
                        info = next(i for i in peer.streams() if i.name == stream)
                        opened, told = (info.starts_at, info.trimmed_upto), True
                    self._events.put(_Delivered(delivery, opened))
                    at = delivery.upto + 1
                    if delivery.ended:
                        return
            except TransportError as err:
                _log.info("node %s: input %s: %s", self.name, stream, err)
                self._stop.wait(_RETRY_S)
            except HoldfastError as err:
                self._events.put(_Finished("", None, 0.0, err))
                return

    def _on_ack(self, stream: str, reader: str) -> None:
        if stream in self.fragment.outputs:
            received = self.log.trimmable(stream)
            self._events.put(core.Acknowledged(now_us(), stream, received))

    def _work(self, path: Path, version: Version, lo: int, hi: int) -> None:
        began = now_us()
        try:
            result = self.engine.run(path, version, lo, hi, self.inputs)
            self.jobs += result.jobs
            self._commit(path, hi, result.outputs)
            self._events.put(_Finished(path.name, result.version, (now_us() - began) / 1e6))
        except BaseException as err:
            self._events.put(_Finished(path.name, None, (now_us() - began) / 1e6, err))

    def _commit(self, path: Path, hi: int, outputs: Mapping[str, list[tuple[int, Any]]]) -> None:
        """Results and boundaries of all outputs in one append. What a predecessor had already
        logged is compared instead: the same bits, or somebody's code is not deterministic."""
        records: list[Any] = []
        for output in path.outputs:
            known_upto = self.log.info(output).complete_upto
            for bucket, table in outputs[output]:
                if bucket < self._valid_from[path.name]:
                    continue
                if bucket <= known_upto:
                    self._compare(output, bucket, table)
                    continue
                id = SegmentId(output, 0, bucket)
                records.append(Added(self.log.write(table, id, Stability.STABLE)))
            if hi > known_upto:
                records.append(Boundary(output, hi))
        if records:
            self.log.append(*records)

    def _compare(self, output: str, bucket: int, table: Any) -> None:
        if bucket <= self.log.info(output).trimmed_upto:
            return
        logged = self.log.segments(output, bucket, bucket)
        if [segment.checksum for segment in logged] != [digest(table)]:
            raise NotDeterministic(
                f"output {output!r}, bucket {bucket}: computed again after a restart it differs "
                "from what was logged; some function in the network is not deterministic"
            )

    # -- the loop -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stop.is_set():
            event = self._events.get()
            if event is None:
                return
            try:
                for action in self._take(event):
                    self._perform(action)
            except Exception as err:
                self._fail(err)
                return

    def _take(self, event: _Delivered | _Finished | core.Event) -> list[core.Action]:
        at = now_us()
        match event:
            case _Delivered(delivery=delivery, info=info):
                actions: list[core.Action] = []
                rows = self.inputs.add(delivery, self.engine.compiled.time[delivery.stream])
                if info is not None:
                    actions += self.core.handle(core.InputOpened(at, delivery.stream, *info))
                return actions + self.core.handle(
                    core.BoundaryArrived(
                        at, delivery.stream, delivery.upto, tuple(rows), delivery.ended
                    )
                )
            case _Finished():
                if event.error is not None:
                    raise event.error
                assert event.version is not None
                self.steps += 1
                self.step_seconds = [*self.step_seconds[-999:], event.seconds]
                self.versions[event.path] = event.version
                path = self.paths[event.path]
                kept = [event.version]
                if event.path in self._durable:
                    kept.append(self._durable[event.path])
                self.engine.release(path, kept)
                horizon = self._horizon(path, event.version)
                return self.core.handle(
                    core.StepDone(
                        at, event.path, event.version.bucket, event.version.needs_from, horizon
                    )
                )
            case _:
                return self.core.handle(event)

    def _horizon(self, path: Path, version: Version) -> int:
        """Without more input something may come out up to here: open windows, then timers."""
        extent = self.core.paths[path.name].plan.extent
        data = [f.bucket for s in path.inputs for f in self.inputs.files(s, -(2**62), 2**62)[-1:]]
        chunks = [c.hi for held in (*version.panes.values(), *version.edges.values()) for c in held]
        last = max([*data, *chunks], default=None)
        horizon = version.bucket if last is None else max(version.bucket, last + extent)
        timers = [
            s.timer_us // self.width_us
            for held in version.shards.values()
            for s in held.values()
            if s.timer_us is not None
        ]
        return max([horizon, *([min(timers) + extent] if timers else [])])

    def _perform(self, action: core.Action) -> None:
        match action:
            case core.Start():
                path = self.paths[action.path]
                self._valid_from[path.name] = action.valid_from
                if path.name not in self.versions:
                    self.versions[path.name] = self.engine.empty(path, action.bucket)
                for output in path.outputs:
                    self._open_output(output, action)
            case core.Run():
                path = self.paths[action.path]
                self._workers.submit(
                    self._work, path, self.versions[path.name], action.lo, action.hi
                )
            case core.Checkpoint():
                self._checkpoint(self.paths[action.path])
            case core.Acknowledge():
                self._acknowledge(action)
            case core.End():
                self._end(self.paths[action.path])
            case core.Fail():
                raise HoldfastError(action.why)

    def _open_output(self, output: str, start: core.Start) -> None:
        compiled = self.engine.compiled
        known = output in self.log.streams()
        self.log.open_stream(output, compiled.schema[output], compiled.time[output], start.origin)
        if not known and start.valid_from > start.origin:
            # Readers must see a gap as a gap, not as empty buckets.
            self.log.append(Boundary(output, start.valid_from - 1))
            self.log.trim(output, start.valid_from - 1)

    def _checkpoint(self, path: Path) -> None:
        version = self.versions[path.name]
        files = [os.path.join("state", name) for name in version.files()]
        self.log.save_state(path.name, version.bucket, version.body(), files)
        self.log.drop_states(path.name, version.bucket)
        self._durable[path.name] = version
        self._events.put(
            core.CheckpointDone(now_us(), path.name, version.bucket, version.needs_from)
        )

    def _acknowledge(self, action: core.Acknowledge) -> None:
        self.inputs.forget(action.stream, self._unreferenced(action.stream))
        peer = self._peers.get(action.stream)
        if peer is None:
            return
        with suppress(TransportError):  # positions are said again with the next step
            peer.acknowledge(
                action.stream, self.name, action.received, action.no_longer_needed, self.log.epoch
            )

    def _unreferenced(self, stream: str) -> int:
        """Up to here no running version reads the stream any more; older ones follow it anew."""
        paths = [path for path in self.fragment.paths if stream in path.inputs]
        return min(self.versions[path.name].needs_from for path in paths) - 1

    def _end(self, path: Path) -> None:
        for output in path.outputs:
            if not self.log.info(output).ended:
                self.log.append(Ended(output))
        if all(state.ended for state in self.core.paths.values()):
            self.ended.set()

    def _fail(self, err: BaseException) -> None:
        self.failure = err
        if isinstance(err, HoldfastError):
            _log.error("node %s stopped: %s", self.name, err)
        else:
            _log.error("node %s stopped by a fault of its own", self.name, exc_info=err)
            if not isinstance(err, ProtocolViolation):
                _log.error("please report this with the log of the node")
        self._stop.set()
        self.ended.set()
