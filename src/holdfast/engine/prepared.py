"""Small jobs whose physical plan runs again.

Spark takes several times as long to plan a small job as to run it. In a node with a local master, a
small job therefore reads files with fixed names, which each step overwrites. If a later step needs
a job with an equal recipe, the DataFrame of the first one is executed again: Spark reuses its
physical plan, and reads what the files contain now.

Spark remembers the length of a file, so the files of a plan have fixed lengths: unused bytes
precede the footer. Not every plan can run again: a shuffle, a broadcast or a subquery would return
the rows of its first execution. Only plans that consist of known nodes are reused.

The executors of a cluster could read an older content of a file, from a cache of their file system.
With such a master, files have unique names and every job is planned.
"""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from holdfast.engine.recipe import Builder, Recipe, files_of
from holdfast.storage.files import storage

#: Physical plan nodes that compute their rows again in every execution.
_REPEATABLE = {
    "FileSourceScanExec", "ColumnarToRowExec", "CoalesceExec", "ProjectExec", "FilterExec",
    "HashAggregateExec", "ObjectHashAggregateExec", "SortAggregateExec", "SortExec", "UnionExec",
    "GenerateExec", "ExpandExec", "SortMergeJoinExec", "CartesianProductExec", "MapInArrowExec",
    "ArrowEvalPythonExec", "BatchEvalPythonExec", "WholeStageCodegenExec", "InputAdapter",
}  # fmt: skip
#: Shortest file of a plan that runs again; longer ones are longer by powers of 4.
_BYTES_MIN = 1 << 16
#: Longer files have unique names, and are deleted after the step.
_BYTES_MAX = 1 << 24
#: Most plans that are kept; a path with 20 outputs may need 40.
_PLANS_MAX = 128


class Prepared:
    """Plans that run again, and the files that they read. Used by one step at a time."""

    def __init__(self, path: str, *, reuse: bool) -> None:
        #: All files begin with this path.
        self._path = path
        self._reuse = reuse
        #: Other steps may use the same folder: of the same line, or of a node before its restart.
        self._series = uuid.uuid4().hex[:8]
        #: None for a recipe whose plan cannot run again.
        self._frames: OrderedDict[tuple[Recipe, int], DataFrame | None] = OrderedDict()
        #: Numbers of the streams and kinds of rows, for file names.
        self._numbers: dict[tuple[str, str], int] = {}
        #: How many files of each this step has written.
        self._count: dict[tuple[str, str], int] = {}
        self._fixed: set[str] = set()
        self._unique: set[str] = set()

    def collect(self, recipe: Recipe, builder: Builder) -> pa.Table:
        """Execute the job of a recipe."""
        files = files_of(recipe) or frozenset()
        recurs = bool(files) and files <= self._fixed
        key = (recipe, id(builder.spark))  # the sessions live as long as the process
        frame = self._frames.get(key) if recurs else None
        if frame is not None:
            self._frames.move_to_end(key)
            return frame.toArrow()
        frame = builder.build(recipe)
        table = frame.toArrow()
        if recurs and key not in self._frames:
            self._frames[key] = frame if is_repeatable(frame, files) else None
            if len(self._frames) > _PLANS_MAX:
                self._frames.popitem(last=False)
        return table

    def end(self) -> None:
        """The step is complete: its files may be overwritten."""
        self._count.clear()
        _unlink(self._unique)
        self._unique.clear()

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Files that are written meanwhile may be overwritten afterwards, in the same step."""
        count, unique = dict(self._count), set(self._unique)
        yield
        self._count = count
        _unlink(self._unique - unique)
        self._unique = unique

    def write(self, rows: pa.Table, of: str, kind: str = "rows") -> str:
        """Write the rows of a stream, or panes, for a job of this step; return the file."""
        sink = pa.BufferOutputStream()
        pq.write_table(
            rows,
            sink,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        return self.copy(memoryview(sink.getvalue()), of, kind)

    def copy(self, data: bytes | memoryview, of: str, kind: str) -> str:
        """`write` for rows in the form of a Parquet file."""
        data = memoryview(data)
        footer = 8 + int.from_bytes(data[-8:-4], "little")
        length = _BYTES_MIN
        while length < len(data):
            length *= 4
        path = self._next(of, kind, f"{length}.parquet", fixed=length <= _BYTES_MAX)
        with storage(path), open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.write(data[:-footer])
            if path in self._fixed:
                file.seek(length - footer)
            file.write(data[-footer:])
        return path

    def write_text(self, text: str, of: str) -> str:
        path = self._next(of, "state", "json", fixed=True)
        with storage(path), open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def _next(self, of: str, kind: str, suffix: str, *, fixed: bool) -> str:
        key = (of, kind)
        number = self._numbers.setdefault(key, len(self._numbers))
        self._count[key] = self._count.get(key, 0) + 1
        fixed = fixed and self._reuse
        name = f"{number}-{self._count[key]}" if fixed else uuid.uuid4().hex[:8]
        path = f"{self._path}.{self._series}.{name}.{suffix}"
        (self._fixed if fixed else self._unique).add(path)
        return path

    def reset(self) -> None:
        """Use other files from now on, because tasks of a failed job may still read these. The
        plans are dropped with the files."""
        self._unique |= self._fixed
        self._fixed.clear()
        self._frames.clear()
        self._series = uuid.uuid4().hex[:8]
        self.end()


def _unlink(files: Iterable[str]) -> None:
    for file in files:
        with suppress(OSError):
            os.unlink(file)


def is_repeatable(frame: DataFrame, files: Collection[str]) -> bool:
    """Whether a second execution of the physical plan reads its rows again, from these files."""

    def repeatable(plan: Any) -> bool:
        if plan.getClass().getSimpleName() not in _REPEATABLE or not plan.subqueries().isEmpty():
            return False
        children = plan.children()
        return all(repeatable(children.apply(index)) for index in range(children.size()))

    # A function of the user may read files of its own, whose lengths change.
    read = {unquote(urlsplit(uri).path) for uri in frame.inputFiles()}
    return read <= set(files) and repeatable(frame._jdf.queryExecution().executedPlan())
