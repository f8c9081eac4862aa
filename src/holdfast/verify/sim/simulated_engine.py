"""The simulated engine: the computations of Spark in production, as plain functions over small
tables.

The simulated engine has the same contract as the production engine. Bucket by bucket or many
buckets at once give the same rows. A version is immutable and names its files. Files are durable
only after a checkpoint has synced them. The past rows that windows and joins need are folded into
state from time to time; afterwards a version refers to no earlier inputs. Errors of a node in the
use of versions, inputs or files therefore show in the simulator as they would in production.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from holdfast.engine.inputs import InputFile, OnResults, StepResult
from holdfast.engine.state import Chunk, Layer, Line, Shard, Version, line_of
from holdfast.errors import LogCorrupted, StorageFull, TooLarge
from holdfast.model import operators as ops
from holdfast.model.fragments import Path
from holdfast.model.network import Network
from holdfast.node.input_index import InputIndex
from holdfast.storage.disk import Disk
from holdfast.storage.files import put_file, storage
from holdfast.types import NO_UPKEEP, Upkeep
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.tables import Row, Rows, rows_digest

#: By key.
State = dict[int, Any]
#: Rows by bucket.
History = dict[int, list[Row]]
#: Number of buckets for which inputs are read again before their rows are folded into state.
FOLD_BUCKETS = 3
#: Most layers of keyed state; more are merged into one.
LAYERS_MAX = 4
#: The entry of a closed key in a layer.
REMOVED = None


class MemoryInputs(InputIndex):
    """The counterpart of the input cache: rows stay in memory, as long as the disk has space."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__("inputs")
        self.tables: dict[str, Rows] = {}
        self._disk = disk

    def table(self, path: str) -> Rows:
        return self.tables[path]

    def _there(self, path: str) -> bool:
        return path in self.tables

    def _readable(self, file: InputFile) -> bool:
        return self._there(file.path)

    def _put(self, table: Any, path: str, time: str) -> int:
        if self._disk.full and self._disk.by_chance():
            raise StorageFull(f"{path}: no space left")
        self.tables[path] = table
        return 0

    def _delete(self, path: str) -> None:
        del self.tables[path]

    def _clear(self) -> None:
        pass


class EngineTwin:
    """Implements `node_events.StepEngine`."""

    def __init__(
        self, network: Network, disk: Disk, folder: str, *, buckets_max: int | None = None
    ) -> None:
        self.network, self.folder = network, folder
        #: The results of more buckets than this do not fit one step; None: no limit.
        self.buckets_max = buckets_max
        self._disk = disk
        self._operators = {op.name: op for op in network.operators}
        self._number = 0
        self._made: dict[str, list[str]] = {}
        self._reach: dict[str, int] = {}

    @property
    def width_us(self) -> int:
        return self.network.width_us

    def schema(self, stream: str) -> str:
        return "ts timestamp, key long, value long"

    def time(self, stream: str) -> str:
        return "ts"

    @property
    def is_merging(self) -> bool:
        return False

    def digest(self, table: Any) -> str:
        return rows_digest(table)

    def plan_hash(self, path: Path) -> str:
        return f"{self.network.name}/{path.name}"

    def empty(self, path: Path, bucket: int) -> Version:
        return Version(path.name, bucket, needs_from=bucket + 1, plan=self.plan_hash(path))

    def run(
        self,
        path: Path,
        version: Version,
        lo: int,
        hi: int,
        inputs: Any,
        *,
        line: Line = "stable",
        on_results: OnResults | None = None,
        upkeep: Upkeep = NO_UPKEEP,
    ) -> StepResult:
        assert version.bucket + 1 == lo <= hi, (version.bucket, lo, hi)
        if self.buckets_max is not None and hi - lo >= self.buckets_max:
            raise TooLarge(f"path {path.name}, buckets {lo} to {hi}: too large")
        step = _Step(self, path, version, inputs, line_of(path.name, line), upkeep)
        outputs: dict[str, list[tuple[int, Any]]] = {name: [] for name in path.outputs}
        for bucket in range(lo, hi + 1):
            for name in path.outputs:
                op = self._operators[name]
                end = op.inputs[0] if isinstance(op, ops.Output) else op
                assert end is not None
                rows = step.rows(end, bucket)
                if rows:
                    outputs[name].append((bucket, Rows(rows)))
            step.advance(bucket)
        if on_results is not None:
            on_results(outputs)
        return StepResult(outputs, step.after(), 1)

    def reach(self, path: Path) -> int:
        """How many buckets of its inputs a result of the path may depend on."""
        if path.name not in self._reach:
            self._reach[path.name] = -(-path.extent_us() // self.width_us)
        return self._reach[path.name]

    def check(self, version: Version) -> None:
        for name in version.files():
            self.load(name)

    def recovered(self, versions: list[Version]) -> None:
        referenced = {name for version in versions for name in version.files()}
        for name in self._disk.files(self.folder):
            if name not in referenced:
                self._disk.delete(f"{self.folder}/{name}")
        for version in versions:
            self._made.setdefault(version.path, []).extend(version.files())

    def release(self, path: Path, kept: list[Version], *, line: Line = "stable") -> None:
        needed = [name for version in kept for name in version.files()]
        of_line = line_of(path.name, line)
        files = self._made.get(of_line, [])
        for name in files:
            if name not in needed and self._disk.exists(f"{self.folder}/{name}"):
                self._disk.delete(f"{self.folder}/{name}")
        self._made[of_line] = [name for name in files if name in needed]

    def save(self, line: str, op: str, bucket: int, state: State | History) -> str:
        self._number += 1
        name = f"{op}.{bucket}.{self._number}.{len(state)}"
        while self._disk.exists(f"{self.folder}/{name}"):
            self._number += 1
            name = f"{op}.{bucket}.{self._number}.{len(state)}"
        data = marshal.dumps(sorted(state.items()), 2)
        data = crc32(data).to_bytes(4, "little") + data
        put_file(f"{self.folder}/{name}", data, fsync=False, disk=self._disk)
        self._made.setdefault(line, []).append(name)
        return name

    def load(self, name: str) -> Any:
        path = os.path.join(self.folder, name)
        if not self._disk.exists(path):
            raise LogCorrupted(f"state file {path} is missing")
        try:
            with storage(path):
                data = self._disk.read(path)
            if crc32(data[4:]).to_bytes(4, "little") != data[:4]:
                raise LogCorrupted(f"state file {path} is damaged")
            state = dict(marshal.loads(data[4:]))
        except (ValueError, EOFError, TypeError) as err:
            raise LogCorrupted(f"state file {path} cannot be decoded ({err})") from None
        if len(state) != int(name.rsplit(".", 1)[1]):
            raise LogCorrupted(f"state file {path} is incomplete")
        return state


class _Step:
    """One run: rows of operators by bucket, computed on demand."""

    def __init__(
        self, engine: EngineTwin, path: Path, version: Version, inputs: Any, line: str,
        upkeep: Upkeep,
    ) -> None:  # fmt: skip
        self.engine, self.path, self.inputs, self.line = engine, path, inputs, line
        self._upkeep = upkeep
        self._known: dict[tuple[str, int], list[Row]] = {}
        self._states: dict[str, State] = {}
        self._histories: dict[str, History] = {}
        self._before = version
        self._bucket = version.bucket

    def rows(self, op: ops.Operator, bucket: int) -> list[Row]:
        key = (op.name, bucket)
        rows = self._known.get(key)
        if rows is None:
            rows = self._known[key] = self._compute(op, bucket)
        return rows

    def _compute(self, op: ops.Operator, bucket: int) -> list[Row]:
        if op.name in self.path.inputs:
            files: list[InputFile] = self.inputs.files(op.name, bucket, bucket)
            return [row for file in files for row in self.inputs.table(file.path).rows]
        above = [up for up in op.inputs if up is not None]
        match op:
            case ops.Union():
                return [row for up in above for row in self.rows(up, bucket)]
            case ops.Part():
                return [r for r in self.rows(above[0], bucket) if belongs(r[1], op.of) == op.number]
            case ops.Apply():
                return list(op.fn(self.rows(above[0], bucket)))
            case ops.TimeWindow():
                return self._window(op, bucket)
            case ops.Join():
                width = self.engine.width_us
                first = (bucket * width - op.within_us) // width
                inside = range(first, bucket + 1)
                sides = [
                    [row for b in inside for row in self._past(op, port, b)] for port in (0, 1)
                ]
                return [row for row in _joined(op, *sides) if row[0] // width == bucket]
            case ops.Stateful():
                state, rows = self.state(op), sorted(self.rows(above[0], bucket))
                out, self._states[op.name] = op.fn(state, rows, (bucket + 1) * self.engine.width_us)
                return list(out)
            case _:
                raise NotImplementedError(f"the simulator does not implement {op.kind}")

    def _window(self, op: ops.TimeWindow, bucket: int) -> list[Row]:
        """The window that ends with this bucket; simulated slides are multiples of a bucket."""
        width = self.engine.width_us
        end = (bucket + 1) * width
        if end % op.slide_us:
            return []
        sums: dict[int, tuple[int, int]] = {}
        for inside in range((end - op.size_us) // width, bucket + 1):
            for _, key, value in self._past(op, 0, inside):
                n, total = sums.get(key, (0, 0))
                sums[key] = n + 1, total + value
        return [(end - 1, key, n, total) for key, (n, total) in sums.items()]

    def _past(self, op: ops.Operator, port: int, bucket: int) -> list[Row]:
        """Past rows that an operator needs: from folded state, or computed from inputs again."""
        above = op.inputs[port]
        assert above is not None
        if bucket >= self._before.needs_from:
            return self.rows(above, bucket)
        edge = f"{op.name}:{port}"
        if edge not in self._histories:
            chunks = self._before.edges.get(edge, ())
            self._histories[edge] = self.engine.load(chunks[0].file) if chunks else {}
        return self._histories[edge].get(bucket, [])

    def state(self, op: ops.Stateful) -> State:
        if op.name not in self._states:
            self._states[op.name] = self._loaded(op.name)
        return self._states[op.name]

    def _loaded(self, op: str) -> State:
        """The state before the step: in the newest layer that has an entry of a key."""
        shard = self._before.shards.get(op, {}).get(0, Shard())
        state: State = {}
        for layer in shard.layers:
            state |= self.engine.load(layer.file)
        state = {key: held for key, held in state.items() if held is not REMOVED}
        if len(state) != shard.rows:
            raise LogCorrupted(f"{op}: expected {shard.rows} keys, found {len(state)}")
        return state

    def advance(self, bucket: int) -> None:
        """Keyed state advances with every bucket, even if no output requested its rows."""
        for op in self.path.operators:
            if isinstance(op, ops.Stateful):
                self.rows(op, bucket)
        self._bucket = bucket

    def after(self) -> Version:
        """The state version after this run."""
        before, hi = self._before, self._bucket
        reach = self.engine.reach(self.path)
        needs_from, edges = max(before.needs_from, hi + 1 - reach), before.edges
        if hi + 1 - needs_from >= min(reach, FOLD_BUCKETS):
            edges = {
                f"{op.name}:{port}": chunks
                for op in self.path.operators
                if isinstance(op, ops.TimeWindow | ops.Join)
                for port in range(len(op.inputs))
                if (chunks := self._fold(op, port, hi + 1 - reach))
            }
            needs_from = hi + 1
        shards = {name: {0: self._shard(name, state)} for name, state in self._states.items()}
        return Version(
            before.path, hi, edges=edges, shards=shards, needs_from=needs_from, plan=before.plan
        )

    def _shard(self, op: str, state: State) -> Shard:
        """The layers with a new one on top, which has the keys that have changed; or one layer with
        all keys."""
        layers, before = self._before.shards.get(op, {}).get(0, Shard()).layers, self._loaded(op)
        most = LAYERS_MAX if self._upkeep.merges is None else 4 * LAYERS_MAX
        if not layers or self._upkeep.merges or len(layers) >= most:
            name = self.engine.save(self.line, op, self._bucket, state)
            return Shard((_layer(name, len(state)),), len(state))
        entries = changed_keys(before, state)
        if not entries:
            return Shard(layers, len(state))
        name = self.engine.save(self.line, op, self._bucket, entries)
        return Shard((*layers, _layer(name, len(entries))), len(state))

    def _fold(self, op: ops.Operator, port: int, first: int) -> tuple[Chunk, ...]:
        buckets = range(first, self._bucket + 1)
        past = {b: rows for b in buckets if (rows := self._past(op, port, b))}
        if not past:
            return ()
        name = self.engine.save(self.line, f"{op.name}-{port}", self._bucket, past)
        return (Chunk(name, min(past), max(past), len(past)),)


def changed_keys(before: State, after: State) -> State:
    """The entries of a new layer: the state of keys that were opened or have changed, and REMOVED
    for those that are closed."""
    found = {key: held for key, held in after.items() if before.get(key, REMOVED) != held}
    return found | {key: REMOVED for key in before if key not in after}


def belongs(key: int, of: int) -> int:
    """The partition of a key."""
    return (key * 2_654_435_761 >> 7) % of


def ideal(network: Network, logged: dict[str, list[Row]]) -> dict[str, dict[int, list[Row]]]:
    """The ideal rows of each output by bucket, computed in one batch from the sources' rows.

    Independent of the step-by-step engine above, except for the networks' own functions and the
    join of two row lists.
    """
    width = network.width_us
    computed: dict[str, list[Row]] = {}

    def rows(op: ops.Operator) -> list[Row]:
        if op.name not in computed:
            computed[op.name] = sorted(_batch(op, logged, rows, width))
        return computed[op.name]

    results: dict[str, dict[int, list[Row]]] = {}
    for output in network.outputs:
        assert output.inputs[0] is not None
        buckets: dict[int, list[Row]] = {}
        for row in rows(output.inputs[0]):
            buckets.setdefault(row[0] // width, []).append(row)
        results[output.name] = buckets
    return results


def _batch(
    op: ops.Operator,
    logged: dict[str, list[Row]],
    rows: Callable[[ops.Operator], Sequence[Row]],
    width: int,
) -> list[Row]:
    above = [row for up in op.inputs if up is not None for row in rows(up)]
    match op:
        case ops.Source():
            return logged[op.name]
        case ops.Union():
            return above
        case ops.Apply():
            return list(op.fn(above))
        case ops.TimeWindow():
            return _all_windows(op, above)
        case ops.Join():
            return _joined(op, *(rows(up) for up in op.inputs if up is not None))
        case ops.Stateful():
            state: State = {}
            out: list[Row] = []
            buckets: dict[int, list[Row]] = {}
            for row in above:
                buckets.setdefault(row[0] // width, []).append(row)
            for bucket in sorted(buckets):
                emitted, state = op.fn(state, sorted(buckets[bucket]), (bucket + 1) * width)
                out += emitted
            return out
        case _:
            raise NotImplementedError(f"the simulator does not implement {op.kind}")


def _joined(op: ops.Join, left: Sequence[Row], right: Sequence[Row]) -> list[Row]:
    """Pairs of rows with equal keys, at the later of both times."""
    by_key: dict[int, list[Row]] = {}
    for row in right:
        by_key.setdefault(row[1], []).append(row)
    return [
        (max(at, other[0]), key, value + other[2])
        for at, key, value in left
        for other in by_key.get(key, ())
        if abs(at - other[0]) <= op.within_us
    ]


def _all_windows(op: ops.TimeWindow, above: list[Row]) -> list[Row]:
    counts: dict[tuple[int, int], int] = {}
    sums: dict[tuple[int, int], int] = {}
    for at, key, value in above:
        end = (at // op.slide_us + 1) * op.slide_us
        while end - op.size_us <= at:
            counts[end, key] = counts.get((end, key), 0) + 1
            sums[end, key] = sums.get((end, key), 0) + value
            end += op.slide_us
    return [(end - 1, key, n, sums[end, key]) for (end, key), n in counts.items()]


def _layer(file: str, entries: int) -> Layer:
    return Layer(file, entries, 0, 0, 0, None, 0, 0)
