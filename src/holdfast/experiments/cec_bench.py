"""Steps of a count window over prepared buckets, with an output log and one form of recovery.

The node runs in this process, without transport: engine, output log (flushed), and checkpoints as
in production (`core/durability.py`, `node/checkpoints.py`): eventual ones, or one in so many
buckets, or none. A crash forgets everything but the files.

The workload is that of the paper (section IV): items with an id, a price and a time, of 100 bytes;
the mean price of windows of so many items of each id.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.clock import monotonic_us
from holdfast.core import durability
from holdfast.core.eventual_checkpoint import Settings
from holdfast.core.job_size import JobLimits
from holdfast.core.path_state import path_state
from holdfast.core.progress_events import Checkpoint, CheckpointDone, Run, StepDone
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import Results
from holdfast.engine.layers import LayerFile, LayerName, merge_layers, merged
from holdfast.engine.recipe import Builder
from holdfast.engine.session import Sessions
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError
from holdfast.experiments.growth_bench import InputFolder
from holdfast.model.fragments import fragments
from holdfast.node.checkpoints import Checkpoints
from holdfast.node.plans import plan_of
from holdfast.storage import Log
from holdfast.storage.rows import TIMESTAMP
from holdfast.streams.soutput import SOutput

WIDTH_US = 100_000
OUTPUT = "means"
#: Fills a row up to 100 bytes: id, price and time have 8 bytes each.
FILL_BYTES = 76
FILTER = "price >= 0"


@dataclass(frozen=True, slots=True)
class Workload:
    ids: int
    #: Rows of a window, and of a bucket.
    window: int
    rows: int

    def table(self, bucket: int) -> pa.Table:
        rng = np.random.default_rng(bucket)
        times = bucket * WIDTH_US + np.sort(rng.integers(0, WIDTH_US, self.rows))
        fill = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(FILL_BYTES),
            self.rows,
            [None, pa.py_buffer(rng.bytes(FILL_BYTES * self.rows))],
        ).cast(pa.binary())
        return pa.table(
            {"ts": pa.array(times, TIMESTAMP), "id": rng.integers(0, self.ids, self.rows),
             "price": rng.integers(1, 1_000, self.rows), "fill": fill}
        )  # fmt: skip

    def network(self, **protection: Any) -> hf.Network:
        net = hf.Network("cec", bucket=f"{WIDTH_US // 1_000}ms")
        items = net.source(
            "items", "ts timestamp, id long, price long, fill binary", time="ts", clock="manual"
        )
        prices = items.apply(lambda df: df.filter(FILTER).select("ts", "id", "price"))
        net.output(OUTPUT, prices.count_window(self.window, by="id").agg(price=hf.avg("price")))
        if protection:
            net.protect("main", **protection)
        return net


class Inputs(InputFolder):
    """The segments of the source, made when they are needed."""

    def __init__(self, workload: Workload, folder: str) -> None:
        super().__init__(folder)
        self._workload, self.folder = workload, folder
        self._prepared_upto = -1

    def prepare(self, upto: int) -> None:
        for bucket in range(self._prepared_upto + 1, upto + 1):
            self.add("items", bucket, self._workload.table(bucket))
            self._prepared_upto = bucket


@dataclass(frozen=True, slots=True)
class Form:
    """A form of recovery."""

    #: "none", "cec", "delta" (checkpoints of changed layers) or "full" (copies of the whole state).
    kind: str
    #: With CEC.
    settings: Settings | None = None
    #: With "delta" and "full", how many buckets are between two checkpoints.
    every: int = 0


class Bench:
    def __init__(
        self, workload: Workload, form: Form, sessions: Sessions, folder: str, inputs: Inputs
    ) -> None:
        self.workload, self.form, self.sessions, self.inputs = workload, form, sessions, inputs
        self.folder = folder
        self.network = workload.network()
        (fragment,) = fragments(self.network)
        (self.path,) = fragment.paths
        #: Checkpoints, the time spent on them, and what they have flushed.
        self.checkpointed = 0
        self.checkpoint_us = 0
        self.durable_bytes = 0
        self.durable_entries = 0
        #: Entries that were written because all layers of a shard became one.
        self.rewritten = 0
        #: The last buckets before a record began, and before layers became one.
        self.named_at: deque[int] = deque(maxlen=5)
        self.merged_at: deque[int] = deque(maxlen=5)
        #: The checkpoint that is being written: its thread, its version, which must stay, and what
        #: it has returned.
        self._thread: threading.Thread | None = None
        self._flushing: list[Version] = []
        self._done: list[CheckpointDone] = []
        self.engine = self._engine()
        self.open()

    def _engine(self) -> Engine:
        return Engine(self.network, self.sessions, os.path.join(self.folder, "state"))

    def open(self) -> None:
        """Start as after a crash: the version from which the next step continues."""
        log: Any = Log.open(self.folder, "main", fsync="always")
        self.log = log
        self.soutput = SOutput(log, self.engine.digest)
        self.soutput.valid_from[self.path.name] = 0
        self.checkpoints = Checkpoints("main", log, self.engine, monotonic_us, self.form.settings)
        version = self.checkpoints.recover([self.path]).get(self.path.name)
        self.engine.recovered([] if version is None else [version])
        if not log.has(OUTPUT):
            log.open_stream(OUTPUT, self.engine.schema(OUTPUT), self.engine.time(OUTPUT), 0)
        self.version = version or self.engine.empty(self.path, -1)
        plan = plan_of(self.path, self.network, "main", ())
        resumed = None if version is None else (version.bucket, version.needs_from, 0)
        self.state = path_state(plan, resumed, "main", 0, JobLimits())
        self.state.origins = {"items": (0, -1)}
        self.state.begin("cec")
        self.state.position = self.version.bucket
        self.control = self.state.eventual = self.checkpoints.eventual.get(self.path.name)

    @property
    def bucket(self) -> int:
        return self.version.bucket

    @property
    def committed(self) -> int:
        upto: int = self.log.info(OUTPUT).complete_upto
        return upto

    @property
    def since_checkpoint(self) -> int:
        """Buckets since the newest checkpoint."""
        newest = self.checkpoints.newest.get(self.path.name)
        return self.bucket - (-1 if newest is None else newest.bucket)

    def advance(self, buckets: int, group: int = 1) -> list[float]:
        """Run so many buckets, in groups. Returns the seconds of each step until its results were
        durable."""
        upto = self.bucket + buckets
        self.inputs.prepare(upto + 1)
        return [self.step(min(hi, upto)) for hi in range(self.bucket + group, upto + group, group)]

    def timed(self, buckets: int, group: int = 1, *, settles: bool = False) -> float:
        """Run so many buckets. Returns the seconds that this takes. `settles`: until all work
        beside the steps is done."""
        self.inputs.prepare(self.bucket + buckets + 1)
        began = time.perf_counter()
        self.advance(buckets, group)
        if settles:
            self.settle()
        return time.perf_counter() - began

    def close(self) -> None:
        """Delete everything."""
        self.settle()
        self.log.close()
        shutil.rmtree(self.folder)

    def step(self, hi: int) -> float:
        """Run up to the end of a bucket. Returns the seconds until the results were durable."""
        self._take_done()
        work, state = Run(self.path.name, self.version.bucket + 1, hi), self.state
        state.waiting = self._waiting(work.lo, hi)
        upkeep = durability.upkeep(state, hi, monotonic_us())
        began, done = time.perf_counter(), []

        def on_results(results: Results) -> None:
            self.soutput.stable(work, self.path, results)
            done.append(time.perf_counter())

        before, self.version = (
            self.version,
            self.engine.run(
                self.path,
                self.version,
                work.lo,
                hi,
                self.inputs,
                on_results=on_results,
                upkeep=upkeep,
            ).version,
        )
        if rewritten := _rewritten(before, self.version):
            self.rewritten += rewritten
            self.merged_at.append(hi)
        took_us = int(1e6 * (time.perf_counter() - began))
        self._take_done()
        rows = state.take_waiting(hi)
        state.position, state.needs_from = hi, self.version.needs_from
        stepped = StepDone(
            monotonic_us(), self.path.name, hi, state.needs_from, hi,
            self.version.entries(), self.version.keys(), took_us, self.version.layered(),
            self.engine.is_merging,
        )  # fmt: skip
        for action in durability.after_step(state, stepped, rows, self.form.every):
            if isinstance(action, Checkpoint):
                self._begin_checkpoint(action.costs)
        newest = self.checkpoints.newest.values()
        self.engine.release(self.path, [self.version, *self._flushing, *newest])
        return (done[-1] if done else time.perf_counter()) - began

    def _waiting(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """Bucket, rows and bytes of the inputs."""
        files = self.inputs.files("items", lo, hi)
        return [(file.bucket, file.rows, os.path.getsize(file.path)) for file in files]

    # -- checkpoints, beside the steps -------------------------------------------------------------

    def _begin_checkpoint(self, costs: tuple[float, ...]) -> None:
        self.named_at.append(self.bucket)
        self._flushing = [self.version]
        run = self._copy if self.form.kind == "full" else partial(self._flush, costs)
        self._thread = threading.Thread(target=run, args=(self.version,))
        self._thread.start()

    def _take_done(self) -> None:
        """Use the checkpoint that was written beside the last steps."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread.join()
        self._thread, self._flushing = None, []
        if not self._done:
            raise HoldfastError("the checkpoint has failed")
        event = self._done.pop()
        self.checkpointed += 1
        self.checkpoint_us += event.took_us
        self.durable_entries += event.new_entries
        assert not durability.done(self.state, event), "nothing asks for a checkpoint at once"

    def _report(self, version: Version, entries: int, new_entries: int, began_us: int) -> None:
        now_us = monotonic_us()
        self._done.append(
            CheckpointDone(
                now_us, version.path, version.bucket, version.needs_from, entries, new_entries,
                now_us - began_us,
            )
        )  # fmt: skip

    def _flush(self, costs: tuple[float, ...], version: Version) -> None:
        newest = self.checkpoints.newest.get(version.path)
        durable = set() if newest is None else {*newest.files()}
        began_us = monotonic_us()
        new_entries = self.checkpoints.write(version, costs)
        self._report(version, version.entries(), new_entries, began_us)
        self.durable_bytes += self._bytes({*version.files()} - durable)

    def _copy(self, version: Version) -> None:
        """Write the complete state to new files, in a job beside the steps."""
        began_us = monotonic_us()
        ((name, shards),) = version.shards.items()
        folder, schema = f"copies+/{version.bucket}", self._schema(name)
        jobs = [
            partial(merge_layers, shard.layers, None, schema, None,
                    LayerName(self.engine.folder, folder, f"shard-{number}"), oldest=True)
            for number, shard in shards.items()
        ]  # fmt: skip
        context = self.sessions.small.sparkContext
        context.setLocalProperty("spark.scheduler.pool", "copies")
        layers = context.parallelize(jobs, 1).map(lambda job: job()).collect()
        copied = {
            number: replace(shard, layers=() if layer is None else (layer,))
            for (number, shard), layer in zip(shards.items(), layers, strict=True)
        }
        before, copy = self.checkpoints.newest.get(version.path), {name: copied}
        new_entries = self.checkpoints.write(replace(version, shards=copy))
        if before is not None:
            for file in before.files():
                os.unlink(os.path.join(self.engine.folder, file))
        self._report(version, new_entries, new_entries, began_us)
        self.durable_bytes += self._bytes(self.checkpoints.newest[version.path].files())

    def _schema(self, name: str) -> pa.Schema:
        operator: Any = self.network.named(name)
        builder = Builder(self.network, self.engine.compiled, self.sessions.small)
        return builder.operator(operator)[0].state

    def _bytes(self, files: Iterable[str]) -> int:
        return sum(os.path.getsize(os.path.join(self.engine.folder, file)) for file in files)

    # -- recovery ----------------------------------------------------------------------------------

    def decode_s(self) -> float:
        """Seconds to decode all entries of the state and to find the valid one of each key. A
        recovery only verifies the files; steps decode the blocks of the keys that they touch."""
        ((name, shards),) = self.version.shards.items()
        schema = self._schema(name)
        began = time.perf_counter()
        for shard in shards.values():
            stack = []
            for layer in shard.layers:
                with LayerFile(self.engine.folder, layer, schema) as file:
                    stack.append(file.all())
            if stack:
                merged(stack, oldest=True)
        return time.perf_counter() - began

    def crash(self) -> None:
        self.settle()
        self.log.close()
        self.engine = self._engine()

    def settle(self) -> None:
        """Wait for work beside the steps."""
        for thread in (self._thread, self.engine.merging.thread):
            if thread is not None:
                thread.join()
        self._take_done()

    def recover(self) -> Recovery:
        """Recover from a crash, until the first bucket after it is committed."""
        began = time.perf_counter()
        self.open()
        opened = time.perf_counter()
        entries = self.version.entries()
        upto, size = self.committed, self.state.job_size
        replayed = self.bucket
        while self.bucket < upto:
            hi = size.last(self._waiting(self.bucket + 1, upto), self.bucket, upto)
            size.fitted(hi - self.bucket)
            self.step(hi)
        regained = time.perf_counter()
        self.step(upto + 1)
        done = time.perf_counter()
        return Recovery(
            done - began, opened - began, regained - opened, done - regained, upto - replayed,
            entries,
        )  # fmt: skip


def _rewritten(before: Version, after: Version) -> int:
    """Entries of the oldest layers that are new."""
    held = set(before.files())
    oldest = [
        shard.layers[0]
        for shards in after.shards.values()
        for shard in shards.values()
        if shard.layers
    ]
    return sum(layer.entries for layer in oldest if layer.file not in held)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of a recovery: in all; to open the log, to read and to verify the state; to replay;
    and for the first new bucket."""

    seconds: float
    load_s: float
    replay_s: float
    next_s: float
    #: Buckets that were replayed, and entries of the state that was read.
    buckets: int
    entries: int


def forget_pages(*folders: str) -> None:
    """Write all files below the folders to the disk and drop them from the page cache."""
    os.sync()
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError), open(os.path.join(parent, name), "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
