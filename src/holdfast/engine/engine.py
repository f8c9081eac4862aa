"""The engine: deterministic Spark jobs over buckets (ARCHITECTURE.md).

`Engine.run(path, version, lo, hi, inputs)` computes every output of a path for buckets lo..hi from
the inputs and the state after lo-1, and returns the state after hi. Several buckets in one job give
the same bits as one bucket per job. Rows of an open window remain in the durable input segments
until the window closes, or until they are folded into panes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from holdfast.engine import exact
from holdfast.engine.compiled import Compiled, compile_network
from holdfast.engine.inputs import InputFile, Inputs, OnResults, StepResult
from holdfast.engine.key_index import KeyIndexes
from holdfast.engine.keyed_operators import has_keys
from holdfast.engine.merging import Merging
from holdfast.engine.prepared import Prepared
from holdfast.engine.sample import sample_rows
from holdfast.engine.session import JOB_ROWS, JobRows, Sessions
from holdfast.engine.spark_errors import error_of_step
from holdfast.engine.state import (
    Line,
    Version,
    check_files,
    files_below,
    line_of,
    release,
    write_rows,
)
from holdfast.engine.step import Step
from holdfast.engine.step_inputs import PANE_BUCKETS, MoreRows, NoTask, at_time
from holdfast.errors import HoldfastError, InputError, TooLarge
from holdfast.model import operators as ops
from holdfast.model.fragments import Path
from holdfast.model.identity import operator_digest
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema
from holdfast.storage.files import storage
from holdfast.storage.rows import digest, routed_alike
from holdfast.types import NO_UPKEEP, Upkeep

#: For so many steps after one that was repeated because of its rows, as many rows are expected.
STEPS_WITH_MORE_ROWS = 15


class Engine:
    """The Spark engine of a node. Several threads may call `run`."""

    def __init__(
        self,
        network: Network,
        sessions: Sessions,
        folder: str,
        *,
        pane_buckets: int = PANE_BUCKETS,
        job_rows: JobRows = JOB_ROWS,
        compiled: Compiled | None = None,
    ) -> None:
        self.network = network
        self.sessions = sessions
        #: Folder of the state files; executors must be able to write to it.
        self.folder = os.path.abspath(folder)
        self.pane_buckets = pane_buckets
        self.job_rows = job_rows
        self.compiled = compiled or compile_network(network, sessions.small)
        #: Operators that use their general plan: all of every path in which a short plan has raised
        #: `TOO_WIDE`.
        self.general: set[str] = set()
        #: Keyed operators whose rows Spark's optimizer has proved to be empty. They must run
        #: because of their timers, so they read an empty file, too.
        self.never_empty: set[str] = set()
        #: Time windows whose panes were too large for the driver to assign them to windows.
        self.wide: set[str] = set()
        #: Joins that have sent new rows to all tasks, and those of them that no longer do so,
        #: because a step was too large.
        self.broadcast: set[str] = set()
        self.no_broadcast: set[str] = set()
        self.merging = Merging(sessions, self.folder)
        self.indexes = KeyIndexes()
        #: The columns by which joins select the rows of their history that new rows can match.
        self.join_keys = {
            op.name: keys for op in network.operators if (keys := self._join_keys(op))
        }
        #: The input edges of these joins.
        self.by_key = {f"{name}:{port}" for name in self.join_keys for port in (0, 1)}
        #: Operators whose state has no key columns and is read as a whole.
        self.whole = {op.name for op in network.operators if self._is_whole(op)}
        plans = self.compiled.plans
        self._with_short_plan = {name for name, plan in plans.items() if plan.general is not None}
        self._made: dict[str, set[str]] = {}
        #: Shard folders of failed steps, by line, until the next `release` of the line.
        self._failed: dict[str, list[str]] = {}
        #: Prepared jobs of each line that no step uses.
        self._idle: dict[str, list[Prepared]] = {}
        #: Of lines whose steps read more rows than expected: how many, and for how many further
        #: steps this is assumed.
        self._more_rows: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        with storage(self.folder):
            os.makedirs(self.folder, exist_ok=True)

    def _is_whole(self, op: ops.Operator) -> bool:
        if not isinstance(op, ops.Stateful) or op.inputs[0] is None:
            return False
        rows = arrow_schema(self.compiled.schema[op.inputs[0].name])
        return not has_keys(arrow_schema(op.state), rows, op.keys)

    def _join_keys(self, op: ops.Operator) -> tuple[str, ...]:
        """The columns of a join, if all values that are equal have the same hash."""
        if not isinstance(op, ops.Join) or not isinstance(op.on, tuple):
            return ()
        sides = [arrow_schema(self.compiled.schema[up.name]) for up in op.inputs if up is not None]
        alike = len(sides) == 2 and all(
            routed_alike(sides[0].field(key).type, sides[1].field(key).type) for key in op.on
        )
        return op.on if alike else ()

    @property
    def width_us(self) -> int:
        return self.network.width_us

    def schema(self, stream: str) -> str:
        return self.compiled.schema[stream]

    def time(self, stream: str) -> str:
        return self.compiled.time[stream]

    def digest(self, table: pa.Table) -> str:
        return digest(table)

    @property
    def is_merging(self) -> bool:
        return self.merging.is_running

    def check(self, version: Version) -> None:
        """Raise LogCorrupted if a file of the version is missing or damaged."""
        check_files(version, self.folder)

    def plan_hash(self, path: Path) -> str:
        """Hash of everything that state depends on: bucket width, shards, and operators with the
        code of their functions."""
        network, schema, plans = self.network, self.compiled.schema, self.compiled.plans
        text = [network.name, str(network.width_us), str(network.partitions)]
        for op in path.operators:
            text.append(f"{op.name} {schema[op.name]} {operator_digest(network, op)}")
            if op.name in plans:
                text.append(" ".join([*plans[op.name].merges, *plans[op.name].dims]))
            if op.name in self.compiled.totals:
                text.append(self.compiled.totals[op.name])
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def empty(self, path: Path, bucket: int) -> Version:
        """The empty state after `bucket`."""
        return Version(path.name, bucket, needs_from=bucket + 1, plan=self.plan_hash(path))

    def run(
        self,
        path: Path,
        version: Version,
        lo: int,
        hi: int,
        inputs: Inputs,
        *,
        line: Line = "stable",
        on_results: OnResults | None = None,
        upkeep: Upkeep = NO_UPKEEP,
    ) -> StepResult:
        """Compute buckets lo..hi. The lines of a path may run at the same time, and a tentative
        line may begin before the last step of an abandoned one ends. `on_results` gets the results
        before the state is complete; if the step fails afterwards, the caller repeats it and gets
        the same results again."""
        assert version.bucket + 1 == lo <= hi, (version.bucket, lo, hi)
        general = frozenset(self.general)  # the other line of the path may change it meanwhile
        try:
            return self._run(path, version, lo, hi, inputs, line, on_results, upkeep)
        except TooLarge:
            joins = {op.name for op in path.operators} & self.broadcast - self.no_broadcast
            if not joins:
                raise
            self.no_broadcast |= joins
            return self._run(path, version, lo, hi, inputs, line, on_results, upkeep)
        except InputError as err:
            short = {op.name for op in path.operators} & self._with_short_plan
            if exact.TOO_WIDE not in str(err) or short <= general:
                raise
            self.general |= short
            return self._run(path, version, lo, hi, inputs, line, on_results, upkeep)

    def _run(
        self, path: Path, version: Version, lo: int, hi: int, inputs: Inputs, line: Line,
        on_results: OnResults | None, upkeep: Upkeep,
    ) -> StepResult:  # fmt: skip
        name = line_of(path.name, line)
        # Each line of each node has a pool: Spark shares the cores evenly among the pools, so that
        # a node that catches up does not starve the others.
        context = self.sessions.small.sparkContext
        context.setLocalProperty("spark.scheduler.pool", f"{self.folder} {name}")
        prepared = self._borrow(name)
        step: Step | None = None
        try:
            rows_min = self._expected_rows(name)
            while True:
                step = Step(
                    self, path, version, lo, hi, inputs,
                    line=name, prepared=prepared, rows_min=rows_min, upkeep=upkeep,
                )  # fmt: skip
                try:
                    return step.run(on_results)
                except MoreRows as more:
                    rows_min = more.rows
                    self._more_rows[name] = (more.rows, STEPS_WITH_MORE_ROWS)
                except NoTask as without:
                    self.never_empty.add(without.op)
                self._undo(step)
                prepared.end()
        except BaseException as err:
            prepared.reset()
            if not isinstance(err, HoldfastError | PySparkException | Py4JJavaError | OSError):
                raise
            if step is not None:
                self._undo(step)
            if (translated := error_of_step(err, path, lo, hi, self.folder)) is err:
                raise
            raise translated from err
        finally:
            prepared.end()
            with self._lock:
                self._idle.setdefault(name, []).append(prepared)

    def _expected_rows(self, line: str) -> int:
        """The rows that a recent step of the line had to be repeated for."""
        rows, left = self._more_rows.get(line, (0, 0))
        if left:
            self._more_rows[line] = (rows, left - 1)
        return rows if left else 0

    def _borrow(self, line: str) -> Prepared:
        """Prepared jobs for a step. A tentative step may begin before the step of an abandoned
        tentative line ends, so a line may have several."""
        with self._lock:
            idle = self._idle.setdefault(line, [])
            if idle:
                return idle.pop()
        path = os.path.join(self.folder, f"job.{line.replace(' ', '-')}")
        return Prepared(path, reuse=self.sessions.is_local)

    def _undo(self, step: Step) -> None:
        """Delete the files of a failed step immediately: a full disk causes many failed retries."""
        self._made.setdefault(step.line, set()).difference_update(step.made)
        release(self.folder, (), step.made)
        failed = self._failed.setdefault(step.line, [])
        failed += [os.path.join(self.folder, folder) for _, folder, _ in step.folders]
        self._sweep(step.line)

    def _sweep(self, line: str) -> None:
        """Delete folders of failed steps. Repeated: tasks of a failed job may continue to write."""
        for folder in self._failed.get(line, ()):
            shutil.rmtree(folder, ignore_errors=True)

    def warm_up(self, path: Path, *, rounds: int = 3) -> None:
        """Run the path over sample rows and discard the results, so that class loading does not
        delay the first real bucket. Errors of user functions on sample rows are ignored."""
        folder = f"{self.folder}-warm"  # may exist from a killed process
        shutil.rmtree(folder, ignore_errors=True)
        try:
            scratch = Engine(
                self.network, self.sessions, folder, pane_buckets=2, compiled=self.compiled
            )
            version = scratch.empty(path, -1)
            reach = max(1, -(-path.extent_us() // self.network.width_us))
            for number in range(rounds):
                inputs = _MadeUp(self, path, folder, number * reach)
                version = scratch.run(
                    path, version, version.bucket + 1, (number + 1) * reach - 1, inputs
                ).version
        except HoldfastError:
            pass
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def recovered(self, versions: Sequence[Version]) -> None:
        """Start from these versions. Delete all other state files, left by a killed process."""
        release(self.folder, versions, files_below(self.folder))
        for version in versions:
            self._made.setdefault(version.path, set()).update(version.files())

    def release(self, path: Path, kept: Sequence[Version], *, line: Line = "stable") -> None:
        """Delete the files of versions that no rollback can select. `kept`: the versions that all
        lines retain. A line deletes only its own files, because other lines may be writing."""
        name = line_of(path.name, line)
        release(self.folder, kept, self._made.setdefault(name, set()))
        self._sweep(name)
        self._failed.pop(name, None)

    def made(self, line: str, file: str) -> None:
        self._made.setdefault(line, set()).add(file)


class _MadeUp:
    """Inputs with one bucket of sample rows per stream."""

    def __init__(self, engine: Engine, path: Path, folder: str, bucket: int) -> None:
        self._held = {}
        for stream in path.inputs:
            schema = arrow_schema(engine.compiled.schema[stream])
            rows = at_time(
                sample_rows(schema, 64), engine.compiled.time[stream],
                bucket * engine.network.width_us,
            )  # fmt: skip
            file = os.path.join(folder, f"{stream}.{bucket}.parquet")
            crc = write_rows(rows, file)
            self._held[stream] = InputFile(bucket, file, rows.num_rows, crc)

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        file = self._held[stream]
        return [file] if lo <= file.bucket <= hi else []
