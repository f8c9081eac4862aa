"""The engine without Spark: its jobs are computed in Arrow, and merges end when the scenario says
so. Everything else is the real engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.engine.compiled import Compiled
from holdfast.engine.engine import Engine
from holdfast.engine.keyed import SHARD, ShardTask
from holdfast.engine.recipe import Query, Read, Recipe, Sharded, United, WindowFunction
from holdfast.engine.state import Line
from holdfast.engine.step import Step
from holdfast.model import operators as ops
from holdfast.model.fragments import Path as NetworkPath
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import TIMESTAMP
from tests.node.crashing_disk import CrashingDisk

WIDTH_US = 100_000
DDL = "ts timestamp, k bigint, x bigint"
ROWS = arrow_schema(DDL)


def rows_of(rng: np.random.Generator, bucket: int, keys: int, most: int) -> pa.Table:
    count = int(rng.integers(1, most + 1))
    times = bucket * WIDTH_US + rng.integers(0, WIDTH_US, count)
    skewed = (keys * rng.random(count) ** 3).astype(np.int64)  # fast and slow windows
    return pa.table([pa.array(times, TIMESTAMP), skewed, rng.integers(0, 100, count)], schema=ROWS)


class Jobs:
    """In place of a Spark session: runs the merges beside the steps, when the scenario says so."""

    is_local = False

    def __init__(self) -> None:
        self.small = self.large = self.sparkContext = self._jsc = self
        self._goes_on = threading.Event()

    def setLocalProperty(self, name: str, value: str) -> None:
        pass

    def parallelize(self, items: list[Any], tasks: int) -> Jobs:
        self._work = items
        return self

    def map(self, run: Callable[[Any], Any]) -> Jobs:
        return self

    def collect(self) -> list[Any]:
        self._goes_on.wait()
        return [work() for work in self._work]

    def go_on(self, thread: threading.Thread) -> None:
        self._goes_on.set()
        thread.join()
        self._goes_on.clear()


class ArrowStep(Step):
    engine: SmallEngine

    def _execute(self, recipe: Recipe) -> pa.Table:
        self.engine.disk.change()
        self.engine.may_fail("results")
        self.jobs += 1
        return self._computed(recipe)

    def _computed(self, recipe: Recipe) -> pa.Table:
        match recipe:
            case Read(of, files):
                schema = arrow_schema(self.compiled.schema[of])
                return pa.concat_tables([pq.ParquetFile(f).read().cast(schema) for f in files])
            case United(parts):
                return pa.concat_tables([self._computed(part) for part in parts])
            case WindowFunction(name, rows):
                window: Any = self.engine.network.named(name)
                return window.fn(self._computed(rows))
            case Query(_, ((_, rows),)):
                windows = self._computed(rows)
                times = windows["__last"].cast(TIMESTAMP)
                return pa.table([times, windows["k"], windows["x"]], schema=ROWS)
            case Sharded():
                return self._sharded(recipe)
        raise NotImplementedError(recipe)

    def _sharded(self, recipe: Sharded) -> pa.Table:
        op: Any = self.engine.network.named(recipe.op)
        operator, out, _ = self.builder.operator(op)
        rows = ROWS.empty_table() if recipe.rows is None else self._computed(recipe.rows)
        shards = self.engine.network.partitions
        places = pa.array(rows["k"].to_numpy() % shards)
        task = ShardTask(op.name, operator, recipe.state, ROWS, out, shards)
        for _ in range(self.engine.runs_of_tasks):  # Spark may run a task twice
            batches = list(task(iter(rows.append_column(SHARD, places).to_batches())))
        self.engine.disk.change()
        return pa.Table.from_batches(batches, out)

    def _count_window(self, op: ops.CountWindow) -> Recipe | None:
        rows = self._keyed_rows(op)
        return None if rows is None else Query("", (("rows", self._keyed(op, rows)),))

    def _forget(self) -> None:
        self.engine.may_fail("state")
        super()._forget()


class SmallEngine(Engine):
    def __init__(self, network: Network, folder: Path, disk: CrashingDisk) -> None:
        compiled = Compiled(network)
        for op in network.operators:
            above: Any = op.inputs[0] if op.inputs else None
            of_rows = op.out if isinstance(op, ops.Stateful) else DDL
            compiled.schema[op.name] = (
                compiled.schema[above.name] if isinstance(op, ops.Output) else of_rows
            )
            compiled.time[op.name] = "ts"
            if isinstance(op, ops.CountWindow):
                plan: Any = SimpleNamespace(dims=(), merges={"x": "sum"}, general=None)
                compiled.plans[op.name] = plan
                if op.slide == op.size:
                    compiled.totals[op.name] = DDL
        jobs: Any = Jobs()
        super().__init__(network, jobs, str(folder), pane_buckets=4, compiled=compiled)
        self.jobs: Jobs = jobs
        self.disk, self.runs_of_tasks = disk, 1
        #: Errors of the next step, before its results are logged or afterwards.
        self.errors: dict[str, Exception] = {}

    def plan_hash(self, path: NetworkPath) -> str:
        return path.name  # the code of functions takes long to compare

    def may_fail(self, when: str) -> None:
        if (error := self.errors.pop(when, None)) is not None:
            raise error

    def made(self, line: str, file: str) -> None:
        self.disk.change()
        super().made(line, file)

    def release(self, path: NetworkPath, kept: Any, *, line: Line = "stable") -> None:
        self.disk.change()
        super().release(path, kept, line=line)
        self.disk.change()

    @property
    def is_merging(self) -> bool:
        thread = self.merging.thread
        return thread is not None and thread.is_alive()

    def merges(self) -> None:
        """The merge under way ends."""
        assert self.merging.thread is not None
        self.jobs.go_on(self.merging.thread)
