"""Steps of a count window over prepared buckets, with an output log and one form of recovery.

The node runs in this process, without transport: engine, output log (flushed), and eventual
checkpoints as in production (`node/eventual_checkpoints.py`), or checkpoints of the whole state, or
none. A crash forgets everything but the log.

The workload is that of the paper (section IV): items with an id, a price and a time, of 100 bytes;
the mean price of windows of so many items of each id.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.clock import monotonic_us
from holdfast.core.eventual_checkpoint import Settings
from holdfast.core.job_size import JobLimits, JobSize
from holdfast.core.progress_events import Run
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import Results
from holdfast.engine.layers import LayerName, merge_layers
from holdfast.engine.recipe import Builder
from holdfast.engine.session import Sessions
from holdfast.engine.state import Version
from holdfast.experiments.growth_bench import InputFolder
from holdfast.model.fragments import fragments
from holdfast.model.protection import Protection
from holdfast.node.checkpoints import Checkpoints
from holdfast.node.eventual_checkpoints import EventualCheckpoints
from holdfast.storage import Log, Record
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

    #: "none", "cec", "delta" or "full".
    kind: str
    #: With CEC.
    settings: Settings | None = None
    #: With checkpoints of the whole state, how many buckets are between two.
    every: int = 0


class Bench:
    def __init__(
        self, workload: Workload, form: Form, sessions: Sessions, folder: str, inputs: Inputs
    ) -> None:
        self.workload, self.form, self.sessions, self.inputs = workload, form, sessions, inputs
        self.folder = folder
        self.network = workload.network(**({} if form.settings is None else {"recovery": "cec"}))
        (fragment,) = fragments(self.network)
        (self.path,) = fragment.paths
        #: Time spent on checkpoints of the whole state, and bytes that they have flushed.
        self.checkpoint_us = 0
        self.durable_bytes = 0
        self._copying: threading.Thread | None = None
        #: The version that is being copied; its files must stay.
        self._copied: list[Version] = []
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
        self.eventual: EventualCheckpoints | None = None
        inputs: Any = self.inputs
        version: Version | None = None
        if self.form.settings is not None:
            self.eventual = EventualCheckpoints(
                "main",
                log,
                self.engine,
                inputs,
                monotonic_us,
                Protection(recovery="cec"),
                self.form.settings,
            )
            version = self.eventual.recover(self.path)
        self.checkpoints = Checkpoints("main", log, self.engine, monotonic_us)
        if self.form.every:
            version = self.checkpoints.recover(self.path)
        self.engine.recovered([] if version is None else [version])
        if self.eventual is not None:
            self.eventual.recovered()
        if not log.has(OUTPUT):
            log.open_stream(OUTPUT, self.engine.schema(OUTPUT), self.engine.time(OUTPUT), 0)
        self.version = version or self.engine.empty(self.path, -1)

    @property
    def bucket(self) -> int:
        return self.version.bucket

    @property
    def committed(self) -> int:
        upto: int = self.log.info(OUTPUT).complete_upto
        return upto

    def advance(self, buckets: int, group: int = 1) -> list[float]:
        """Run so many buckets, in groups. Returns the seconds of each step until its results were
        durable."""
        upto = self.bucket + buckets
        self.inputs.prepare(upto + 1)
        return [self.step(min(hi, upto)) for hi in range(self.bucket + group, upto + group, group)]

    def timed(self, buckets: int, group: int = 1) -> float:
        """Run so many buckets. Returns the seconds that this takes."""
        self.inputs.prepare(self.bucket + buckets + 1)
        began = time.perf_counter()
        self.advance(buckets, group)
        return time.perf_counter() - began

    def close(self) -> None:
        """Delete everything."""
        self.settle()
        self.log.close()
        shutil.rmtree(self.folder)

    def step(self, hi: int) -> float:
        """Run up to the end of a bucket. Returns the seconds until the results were durable."""
        work = Run(self.path.name, self.version.bucket + 1, hi)
        began, done = time.perf_counter(), []

        def on_results(results: Results, *more: Record) -> None:
            self.soutput.stable(work, self.path, results, *more)
            done.append(time.perf_counter())

        if self.eventual is not None:
            self.version = self.eventual.run(self.path, self.version, work, on_results).version
        else:
            self.version = self.engine.run(
                self.path, self.version, work.lo, hi, self.inputs, on_results=on_results
            ).version
        if self.form.every and hi % self.form.every == 0:
            self._checkpoint()
        kept = [self.version, *self._copied]
        if self.form.every:
            kept += self.checkpoints.newest.values()
        self.engine.release(self.path, kept)
        return (done[-1] if done else time.perf_counter()) - began

    @property
    def spent_us(self) -> int:
        """Time spent on checkpoints."""
        if self.eventual is None:
            return self.checkpoint_us
        written = self.eventual.written
        return written["took_us"] + written["sync_us"]

    # -- checkpoints of the whole state ------------------------------------------------------------

    def _checkpoint(self) -> None:
        if self.form.kind == "delta":
            newest = self.checkpoints.newest.get(self.version.path)
            durable = set() if newest is None else {*newest.files()}
            began_us = monotonic_us()
            self.checkpoints.write(self.version)
            self.checkpoint_us += monotonic_us() - began_us
            self.durable_bytes += self._bytes({*self.version.files()} - durable)
        elif self._copying is None or not self._copying.is_alive():
            self._copied = [self.version]
            self._copying = threading.Thread(target=self._copy, args=(self.version,))
            self._copying.start()

    def _copy(self, version: Version) -> None:
        """Write the complete state to new files, in a job beside the steps."""
        began_us = monotonic_us()
        ((name, shards),) = version.shards.items()
        folder = f"copies+/{version.bucket}"
        operator: Any = self.network.named(name)
        builder = Builder(self.network, self.engine.compiled, self.sessions.small)
        schema = builder.operator(operator)[0].state
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
        before = self.checkpoints.newest.get(version.path)
        self.checkpoints.write(replace(version, shards={name: copied}))
        if before is not None:
            for file in before.files():
                os.unlink(os.path.join(self.engine.folder, file))
        self._copied = []
        self.checkpoint_us += monotonic_us() - began_us
        self.durable_bytes += self._bytes(self.checkpoints.newest[version.path].files())

    def _bytes(self, files: Iterable[str]) -> int:
        return sum(os.path.getsize(os.path.join(self.engine.folder, file)) for file in files)

    # -- recovery ----------------------------------------------------------------------------------

    def crash(self) -> None:
        self.settle()
        self.log.close()
        self.engine = self._engine()

    def settle(self) -> None:
        """Wait for work beside the steps."""
        for thread in (self._copying, self.engine.merging.thread):
            if thread is not None:
                thread.join()

    def recover(self) -> Recovery:
        """Recover from a crash, until the first bucket after it is committed."""
        began = time.perf_counter()
        self.open()
        opened = time.perf_counter()
        control = None if self.eventual is None else self.eventual.controls[self.path.name]
        entries = 0 if control is None else control.extent
        upto, size = self.committed, JobSize(JobLimits())
        replayed, first = self.bucket, None
        while self.bucket < upto:
            waiting = [
                (file.bucket, file.rows, os.path.getsize(file.path))
                for file in self.inputs.files("items", self.bucket + 1, upto)
            ]
            hi = size.last(waiting, self.bucket, upto)
            size.fitted(hi - self.bucket)
            self.step(hi)
            first = first or time.perf_counter()
        regained = time.perf_counter()
        self.step(upto + 1)
        done = time.perf_counter()
        return Recovery(
            done - began, opened - began, (first or opened) - opened, regained - (first or opened),
            done - regained, upto - replayed, entries,
            0.0 if self.eventual is None else self.eventual.load_us[self.path.name] / 1e6,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of a recovery: in all; to open the log; for the first step, which loads the
    footprints; for the others; and for the first new bucket."""

    seconds: float
    open_s: float
    first_s: float
    others_s: float
    next_s: float
    #: Buckets that were replayed, entries that were loaded, and the time to load them.
    buckets: int
    entries: int
    load_s: float


def forget_pages(*folders: str) -> None:
    """Write all files below the folders to the disk and drop them from the page cache."""
    os.sync()
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                fd = os.open(os.path.join(parent, name), os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
