"""Runs the engine of a network over whole tables, in any grouping of buckets, without nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Literal

import numpy as np
import pyarrow as pa

from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import InputFile
from holdfast.engine.session import JobRows, Sessions
from holdfast.model import operators as ops
from holdfast.model.fragments import Path, fragments
from holdfast.model.network import Network
from holdfast.model.partitions import physical
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import canonical, digest, times_us
from holdfast.storage.segment import write_segment

#: The kind of jobs in which a network runs, whatever its number of rows. `wide`: large ones, with
#: panes that are too large for the driver.
Jobs = Literal["small", "medium", "large", "wide"]
LIMITS: dict[Jobs, JobRows] = {
    "small": JobRows(selected=100),
    "medium": JobRows(compiled=0, selected=0),
    "large": JobRows(compiled=0, distributed=0),
    "wide": JobRows(compiled=0, distributed=0),
}


def wide_windows(network: Network, jobs: Jobs) -> set[str]:
    """The time windows whose panes are too large for the driver (`Engine.wide`)."""
    if jobs != "wide":
        return set()
    return {op.name for op in network.operators if isinstance(op, ops.TimeWindow)}


class Files:
    """Input segments of whole tables, divided into buckets."""

    def __init__(self, network: Network, tables: Mapping[str, pa.Table], folder: str) -> None:
        self.folder = folder
        self.by_stream: dict[str, list[InputFile]] = {}
        for op in network.sources:
            schema = arrow_schema(op.schema)
            table = canonical(tables[op.name].select(schema.names).cast(schema))
            buckets = times_us(table, op.time) // network.width_us
            for bucket in np.unique(buckets):
                rows = table.filter(pa.array(buckets == bucket))
                self.add(op.name, int(bucket), rows, op.time)

    def add(self, stream: str, bucket: int, rows: pa.Table, time: str) -> None:
        path = os.path.join(self.folder, f"{stream}.{bucket}.parquet")
        file = write_segment(rows, path, time=time, fsync=False)
        held = self.by_stream.setdefault(stream, [])
        held.append(InputFile(bucket, path, rows.num_rows, file.crc))

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        return [file for file in self.by_stream.get(stream, ()) if lo <= file.bucket <= hi]

    def span(self) -> tuple[int, int]:
        buckets = [file.bucket for files in self.by_stream.values() for file in files]
        return min(buckets), max(buckets)


class Retained:
    """The segments that producers retain for a version; older ones may have been deleted."""

    def __init__(self, files: Files, needs_from: int) -> None:
        self._files, self._needs_from = files, needs_from

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        return self._files.files(stream, max(lo, self._needs_from), hi)


def run_network(
    network: Network,
    tables: Mapping[str, pa.Table],
    sessions: Sessions,
    *,
    groups: Iterable[int] = (1_000_000,),
    extra_buckets: int | None = None,
    pane_buckets: int = 16,
    jobs: Jobs = "small",
) -> dict[str, pa.Table]:
    """Every output as one table, over all buckets with rows and `extra_buckets` after them (by
    default the reach of the windows). `groups`: sizes of the groups of buckets, repeated."""
    network = physical(network)
    with tempfile.TemporaryDirectory(prefix="holdfast-engine-") as folder:
        files = Files(network, tables, folder)
        first, last = files.span()
        compiled = compile_network(network, sessions.small)
        outputs: dict[str, list[pa.Table]] = {op.name: [] for op in network.outputs}
        #: The last bucket of each stream.
        ends = {op.name: last for op in network.sources}
        for fragment, path in _in_order(network):
            engine = Engine(
                network, sessions, os.path.join(folder, "state", fragment, path.name),
                pane_buckets=pane_buckets, job_rows=LIMITS[jobs], compiled=compiled,
            )  # fmt: skip
            engine.wide |= wide_windows(network, jobs)
            extent = -(-path.extent_us() // network.width_us) + len(path.operators)
            end = max(ends[stream] for stream in path.inputs)
            end += extent if extra_buckets is None else extra_buckets
            version = engine.empty(path, first - 1)
            for lo, hi in _cut(first, end, groups):
                result = engine.run(path, version, lo, hi, Retained(files, version.needs_from))
                version = result.version
                engine.release(path, [version])
                for output, buckets in result.outputs.items():
                    for bucket, table in buckets:
                        times = times_us(table, compiled.time[output])
                        assert set(times // network.width_us) == {bucket}
                        files.add(output, bucket, table, compiled.time[output])
                        outputs.get(output, []).append(table)
            ends |= dict.fromkeys(path.outputs, end)
        return {
            name: pa.concat_tables([arrow_schema(compiled.schema[name]).empty_table(), *parts])
            for name, parts in outputs.items()
        }


def _in_order(network: Network) -> Iterator[tuple[str, Path]]:
    """All paths with their fragments, upstream first."""
    known = {op.name for op in network.sources}
    waiting = [(fragment.name, path) for fragment in fragments(network) for path in fragment.paths]
    while waiting:
        found = next(place for place in waiting if known.issuperset(place[1].inputs))
        waiting.remove(found)
        known.update(found[1].outputs)
        yield found


def digests(outputs: Mapping[str, pa.Table]) -> dict[str, tuple[int, str]]:
    """Number of rows and order-independent digest of every output; equal iff every bit is equal."""
    return {name: (table.num_rows, digest(table)) for name, table in outputs.items()}


def _cut(first: int, end: int, groups: Iterable[int]) -> Iterator[tuple[int, int]]:
    lo = first
    for size in cycle(groups):
        if lo > end:
            return
        yield lo, min(end, lo + size - 1)
        lo += size
