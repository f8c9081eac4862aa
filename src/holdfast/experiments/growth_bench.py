"""Steps of an engine over prepared buckets, with their time, memory, files and bytes written.

The engine runs in this process, without sources, logs and clients: their costs do not depend on
the state. All paths of a network run one after the other, so the time of a step is the work of all
its nodes.

Bytes written are the sizes of the files that appear in the folder of the state. The engine deletes
state files only in `Engine.release`, which is called here, so listing the folder before and after
each step finds every file, also those that merges write beside the steps. The files of jobs, which
steps overwrite, are counted apart. Spark's own temporary files are not counted.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from holdfast.engine.engine import Engine
from holdfast.engine.inputs import InputFile
from holdfast.engine.layers import FANOUT
from holdfast.engine.session import Sessions
from holdfast.engine.state import Version, write_rows
from holdfast.errors import HoldfastError
from holdfast.model import operators as ops
from holdfast.model.fragments import Path, fragments
from holdfast.model.network import Network
from holdfast.model.partitions import physical
from holdfast.storage.disk import TEMPORARY

#: Merges are done after so many steps that start none, and at the latest after `SETTLE_STEPS_MAX`
#: steps. Layers of the load may have the level of the first few layers of steps.
QUIET_STEPS = FANOUT + 4
SETTLE_STEPS_MAX = 200
MB = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """A query, its inputs, and the state before the measurement."""

    network: Network
    #: The rows of a source in a bucket.
    rows: Callable[[str, int], pa.Table]
    first: int
    #: Buckets of history before the measured ones, and how many of them run in one step.
    history: int = 0
    group: int = 256
    #: A network with the same state, which builds the history in an engine of its own: what an
    #: engine learns from large steps would change the measured ones.
    builder: Network | None = None
    #: Rows that the results of a step count in their columns `n`, to check the history.
    counted: int | None = None


@dataclass(frozen=True, slots=True)
class Effort:
    """Steps of the warm-up and of the measurement. Both end early after `seconds`."""

    warm: int = 20
    steps: int = 40
    steps_min: int = 5
    seconds: float = 15.0


class InputFolder:
    """The inputs of all paths."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, list[InputFile]] = {}

    def add(self, stream: str, bucket: int, rows: pa.Table) -> None:
        path = os.path.join(self._folder, f"{stream}.{bucket}.parquet")
        crc = write_rows(rows, path)
        held = self._files.setdefault(stream, [])
        held.append(InputFile(bucket, path, rows.num_rows, crc))

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        held = self._files.get(stream, [])
        return held[
            bisect_left(held, lo, key=lambda file: file.bucket) : bisect_right(
                held, hi, key=lambda file: file.bucket
            )
        ]


class Bench:
    def __init__(self, case: Case, sessions: Sessions, folder: str) -> None:
        self.case, self.sessions, self.folder = case, sessions, folder
        self.state = os.path.join(folder, "state")
        self.inputs = InputFolder(os.path.join(folder, "in"))
        self.network = physical(case.network)
        self._use(self._engine(self.network))
        self.versions: dict[str, Version] = {
            path.name: self.engine.empty(path, case.first - 1) for path in self.paths
        }
        self.outputs = {op.name for op in self.network.outputs}
        self.next = case.first
        self.written = Written(self.state)
        #: The results of the last step.
        self.results: list[pa.Table] = []

    def _engine(self, network: Network) -> Engine:
        return Engine(network, self.sessions, self.state, pane_buckets=1)

    def _use(self, engine: Engine) -> None:
        self.engine, self.paths = engine, _upstream_first(engine.network)

    def build_history(self) -> None:
        """Run the history in large steps. Then run steps until no merge is under way."""
        end, engine = self.case.first + self.case.history, self.engine
        if self.case.builder is not None:
            self._use(self._engine(self.case.builder))
        while self.next < end:
            self.step(min(self.case.group, end - self.next))
        if self.case.builder is not None:
            self._use(engine)
            for path in self.paths:
                held = replace(self.versions[path.name], plan=engine.plan_hash(path))
                self.versions[path.name] = held
            engine.recovered(list(self.versions.values()))
        quiet = 0
        for _ in range(SETTLE_STEPS_MAX):
            thread = self.engine.merging.thread
            if thread is None or quiet >= QUIET_STEPS:
                break
            thread.join()
            self.step()
            quiet = quiet + 1 if self.engine.merging.thread is thread else 0

    def step(self, buckets: int = 1) -> float:
        """Run the next buckets in one step; return the milliseconds until results are written."""
        lo, hi = self.next, self.next + buckets - 1
        for source in self.network.operators:
            if isinstance(source, ops.Source):
                for bucket in range(lo, hi + 1):
                    self.inputs.add(source.name, bucket, self.case.rows(source.name, bucket))
        self.written.look()
        self.results = []
        began = time.perf_counter()
        for path in self.paths:
            result = self.engine.run(path, self.versions[path.name], lo, hi, self.inputs)
            for stream, rows in result.outputs.items():
                for bucket, table in rows:
                    self.inputs.add(stream, bucket, table)
                    if stream in self.outputs:
                        self.results.append(table)
            self.versions[path.name] = result.version
        took_ms = 1_000 * (time.perf_counter() - began)
        self.written.look()
        for path in self.paths:
            self.engine.release(path, [self.versions[path.name]])
        self.next = hi + 1
        return took_ms

    def measure(self, effort: Effort) -> dict[str, Any]:
        """Measure single buckets, after a warm-up."""
        began = time.perf_counter()
        for done in range(effort.warm):
            if done >= 3 and time.perf_counter() - began > effort.seconds:
                break
            self.step()
        self.written.look()
        state_bytes = self.written.held_bytes()
        self.written.reset()
        step_ms: list[float] = []
        rows_out = 0
        began = time.perf_counter()
        while len(step_ms) < effort.steps:
            late = time.perf_counter() - began > effort.seconds
            if late and len(step_ms) >= effort.steps_min:
                break
            step_ms.append(self.step())
            rows_out += sum(table.num_rows for table in self.results)
        if (thread := self.engine.merging.thread) is not None:
            thread.join()  # the bytes of a merge that these steps have caused count
        self.written.look()
        self._check_results()
        return {
            "steps": len(step_ms),
            "step_ms": round(float(np.median(step_ms)), 2),
            "step_ms_p99": round(float(np.percentile(step_ms, 99)), 2),
            "step_ms_mean": round(float(np.mean(step_ms)), 2),
            "rows_out": round(rows_out / len(step_ms), 1),
            "bytes_written": round(self.written.state_bytes / len(step_ms)),
            "job_bytes_written": round(self.written.job_bytes / len(step_ms)),
            "state_bytes": state_bytes,
            "files": self.written.files,
            "memory_mb": memory_mb(self.sessions),
        }

    def _check_results(self) -> None:
        counted = sum(int(np.sum(table["n"].to_numpy())) for table in self.results
                      if "n" in table.column_names)  # fmt: skip
        if self.case.counted not in (None, counted):
            raise HoldfastError(
                f"growth: expected results that count {self.case.counted} rows, found {counted}"
            )


def _upstream_first(network: Network) -> list[Path]:
    waiting = [path for fragment in fragments(network) for path in fragment.paths]
    known = {op.name for op in network.operators if isinstance(op, ops.Source)}
    order: list[Path] = []
    while waiting:
        ready = [path for path in waiting if known.issuperset(path.inputs)]
        assert ready, [path.inputs for path in waiting]
        order += ready
        known.update(stream for path in ready for stream in path.outputs)
        waiting = [path for path in waiting if path not in ready]
    return order


class Written:
    """The files that appear in a folder, and their bytes."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        #: Inode, time of the last change and size of each file at the last look.
        self._seen: dict[str, tuple[int, int, int]] = {}
        self.state_bytes = self.job_bytes = 0

    @property
    def files(self) -> int:
        return len(self._seen)

    def held_bytes(self) -> int:
        """Bytes of the files of state at the last look."""
        held = self._seen.items()
        return sum(size for name, (_, _, size) in held if not _is_of_a_job(name))

    def reset(self) -> None:
        self.state_bytes = self.job_bytes = 0

    def look(self) -> None:
        seen = dict(_files(self._folder))
        for path, file in seen.items():
            before = self._seen.get(path)
            if before == file:
                continue
            appended = before is not None and before[0] == file[0] and before[2] < file[2]
            written = file[2] - before[2] if appended and before is not None else file[2]
            if _is_of_a_job(path):
                self.job_bytes += written
            else:
                self.state_bytes += written
        self._seen = seen


def _is_of_a_job(path: str) -> bool:
    return os.path.basename(path).startswith("job.")


def _files(folder: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    yield from _files(entry.path)
                elif not entry.name.endswith(TEMPORARY):  # still being written
                    status = entry.stat()
                    yield entry.path, (status.st_ino, status.st_mtime_ns, status.st_size)
            except FileNotFoundError:  # deleted by a merge
                continue


def memory_mb(sessions: Sessions) -> dict[str, float]:
    """Heap in use of the JVM after a collection, and resident memory of this Python process."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    jvm: Any = sessions.small.sparkContext._jvm
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    return {
        "heap": round((runtime.totalMemory() - runtime.freeMemory()) / MB, 1),
        "python": round(psutil.Process().memory_info().rss / MB, 1),
    }


@contextmanager
def peak_mb(interval_s: float = 0.05) -> Iterator[Callable[[], float]]:
    """Watch the resident memory of this Python process; the function returns its peak."""
    process, ended = psutil.Process(), threading.Event()
    peak = [process.memory_info().rss]

    def watch() -> None:
        while not ended.wait(interval_s):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: round(peak[0] / MB, 1)
    finally:
        ended.set()
        thread.join()
