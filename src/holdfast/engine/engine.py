"""The engine: deterministic Spark jobs over buckets (ARCHITECTURE.md).

`Engine.run(path, version, lo, hi, inputs)` computes every output of a path for buckets lo..hi from
the inputs and the state after lo-1, and gives the state after hi. Several buckets in one job give
the same bits as one by one. Work is done only where a result is due: rows of an open window stay
where they are, in the durable input segments, until the window closes or many have gathered and
are folded into panes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from holdfast.engine.compiled import Compiled, compile_network
from holdfast.engine.inputs import InputFile, Inputs, StepResult
from holdfast.engine.sample import sample_rows
from holdfast.engine.session import Sessions
from holdfast.engine.spark_errors import error_of_step
from holdfast.engine.state import Version, check_files, files_below, release, write_rows
from holdfast.engine.step import Step
from holdfast.engine.step_inputs import PANE_BUCKETS
from holdfast.errors import HoldfastError
from holdfast.model.fragments import Path
from holdfast.model.identity import operator_digest
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema
from holdfast.storage.files import storage
from holdfast.storage.rows import digest


class Engine:
    """Compiled once per node; `run` may be called from one thread per path."""

    def __init__(
        self,
        network: Network,
        sessions: Sessions,
        folder: str,
        *,
        pane_buckets: int = PANE_BUCKETS,
        compiled: Compiled | None = None,
    ) -> None:
        self.network = network
        self.sessions = sessions
        #: Where state files live; executors must be able to write there.
        self.folder = os.path.abspath(folder)
        self.pane_buckets = pane_buckets
        self.compiled = compiled or compile_network(network, sessions.small)
        self._made: dict[str, set[str]] = {}
        #: Folders of shards that failed steps of each path left, until one has succeeded.
        self._failed: dict[str, list[str]] = {}
        self._readers: dict[tuple[int, str], Any] = {}
        with storage(self.folder):
            os.makedirs(self.folder, exist_ok=True)

    @property
    def width_us(self) -> int:
        return self.network.width_us

    def schema(self, stream: str) -> str:
        return self.compiled.schema[stream]

    def time(self, stream: str) -> str:
        return self.compiled.time[stream]

    def digest(self, table: pa.Table) -> str:
        return digest(table)

    def check(self, version: Version) -> None:
        """Raises when a file of the version is missing or damaged."""
        check_files(version, self.folder)

    def plan_hash(self, path: Path) -> str:
        """Changes when the query changes in a way the state can feel, the code of its functions
        included."""
        network, schema = self.network, self.compiled.schema
        text = [network.name, str(network.width_us), str(network.partitions)]
        for op in path.operators:
            text.append(f"{op.name} {schema[op.name]} {operator_digest(network, op)}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def empty(self, path: Path, bucket: int) -> Version:
        """The state before anything: after `bucket`, nothing is known."""
        return Version(path.name, bucket, needs_from=bucket + 1, plan=self.plan_hash(path))

    def run(
        self,
        path: Path,
        version: Version,
        lo: int,
        hi: int,
        inputs: Inputs,
        *,
        tentative: bool = False,
    ) -> StepResult:
        """One thread may run the stable line of a path while another runs its tentative one."""
        assert version.bucket + 1 == lo <= hi, (version.bucket, lo, hi)
        step = Step(self, path, version, lo, hi, inputs, line=line_of(path, tentative))
        known = frozenset(self._made.get(step.line, ()))
        try:
            return step.run()
        except (HoldfastError, PySparkException, Py4JJavaError, OSError) as err:
            self._undo(step, known)
            if (told := error_of_step(err, path, lo, hi, self.folder)) is err:
                raise
            raise told from err
        finally:
            for file in step.scratch:
                with suppress(OSError):  # what failed, or who deleted the storage, is told above
                    os.unlink(file)

    def _undo(self, step: Step, known: frozenset[str]) -> None:
        """What a failed step wrote goes at once: on a full disk it is run again and again."""
        made = self._made.setdefault(step.line, set())
        release(self.folder, (), made - known)
        made &= known
        failed = self._failed.setdefault(step.line, [])
        failed += [os.path.join(self.folder, folder) for _, folder in step.folders]
        self._sweep(step.line)

    def _sweep(self, line: str) -> None:
        """Tasks of a failed job may write for a while yet, so this is done more than once."""
        for folder in self._failed.get(line, ()):
            shutil.rmtree(folder, ignore_errors=True)

    def warm_up(self, path: Path, *, rounds: int = 3) -> None:
        """Run the path over made-up rows and forget the results: the first real bucket should not
        pay for class loading. What user functions make of such rows does not matter."""
        folder = f"{self.folder}-warm"  # a killed predecessor may have left it
        shutil.rmtree(folder, ignore_errors=True)
        try:
            scratch = Engine(
                self.network, self.sessions, folder, pane_buckets=2, compiled=self.compiled
            )
            version = scratch.empty(path, -1)
            reach = max(1, -(-path.extent_us() // self.network.width_us))
            for number in range(rounds):
                made = _MadeUp(self, path, folder, number * reach)
                version = scratch.run(
                    path, version, version.bucket + 1, (number + 1) * reach - 1, made
                ).version
        except HoldfastError:
            pass
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def recovered(self, versions: Sequence[Version]) -> None:
        """Start from these versions: what a killed predecessor left beside them goes."""
        release(self.folder, versions, files_below(self.folder))
        for version in versions:
            self._made.setdefault(version.path, set()).update(version.files())

    def release(self, path: Path, kept: Sequence[Version], *, tentative: bool = False) -> None:
        """Old versions nothing can roll back to give their files back. `kept` are those of both
        lines; a line deletes only what it made itself, since the other may be making more."""
        line = line_of(path, tentative)
        release(self.folder, kept, self._made.setdefault(line, set()))
        self._sweep(line)
        self._failed.pop(line, None)

    def made(self, line: str, file: str) -> None:
        self._made.setdefault(line, set()).add(file)

    def reader(self, spark: SparkSession, schema: Any) -> Any:
        """A reader of Parquet files with a schema, DDL or StructType, made once."""
        key = (id(spark), str(schema))
        if key not in self._readers:
            self._readers[key] = spark.read.schema(schema)
        return self._readers[key]


def line_of(path: Path, tentative: bool) -> str:
    return f"{path.name}~" if tentative else path.name


class _MadeUp:
    """A bucket of sample rows on every input."""

    def __init__(self, engine: Engine, path: Path, folder: str, bucket: int) -> None:
        self._held = {}
        for stream in path.inputs:
            schema = arrow_schema(engine.compiled.schema[stream])
            rows, time = sample_rows(schema, 64), engine.compiled.time[stream]
            at = pa.scalar(bucket * engine.network.width_us, pa.int64()).cast(
                schema.field(time).type
            )
            rows = rows.set_column(
                rows.column_names.index(time), schema.field(time), pa.repeat(at, rows.num_rows)
            )
            file = os.path.join(folder, f"{stream}.{bucket}.parquet")
            write_rows(rows, file)
            self._held[stream] = InputFile(bucket, file, rows.num_rows)

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        file = self._held[stream]
        return [file] if lo <= file.bucket <= hi else []
