"""Keyed state in layers: the same results as with all state in one piece. No JVM."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast.engine import layers
from holdfast.engine.count_windows import CountTotals, CountWindows
from holdfast.engine.keyed import StepState, run_shard
from holdfast.engine.keyed_operators import KeyedOperator, UserFunction, has_keys
from holdfast.engine.state import Shard
from holdfast.errors import InputError, LogCorrupted
from holdfast.storage.rows import TIMESTAMP, sort_canonical

WIDTH_US = 100_000
ROWS = pa.schema([("ts", TIMESTAMP), ("k", pa.int64()), ("x", pa.float64())])
STATE = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("due", TIMESTAMP)])
OUT = pa.schema([("ts", TIMESTAMP), ("k", pa.int64()), ("n", pa.int64())])
GAP_US = 700_000


def sessions(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Count the rows of each key; a key is removed `GAP_US` after its last row, unless it is
    odd."""
    held = {row["k"]: row for row in state.cast(_plain(STATE)).to_pylist()}
    for row in rows.cast(_plain(ROWS)).to_pylist():
        old = held.get(row["k"])
        due = None if (row["k"] or 0) % 2 else max(row["ts"] + GAP_US, info.end_us)
        held[row["k"]] = {"k": row["k"], "n": old["n"] + 1 if old else 1, "due": due}
    ended = [r for r in held.values() if r["due"] is not None and r["due"] < info.end_us]
    open_ = [r for r in held.values() if r not in ended]
    out = [{"ts": info.start_us, "k": r["k"], "n": r["n"]} for r in ended]
    return (
        pa.Table.from_pylist(out, _plain(OUT)).cast(OUT),
        pa.Table.from_pylist(open_, _plain(STATE)).cast(STATE),
    )


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema([
        (f.name, pa.int64() if pa.types.is_timestamp(f.type) else f.type) for f in schema
    ])  # fmt: skip


def function(*, by_key: bool, fn: Any = sessions) -> UserFunction:
    keys = ("k",) if by_key else None
    return UserFunction(fn, "f", "ts", "due", STATE, OUT, WIDTH_US, keys)


OPERATORS: dict[str, KeyedOperator] = {
    "totals": CountTotals(
        ("k",), "ts", 4, (), {"ts": "max"},
        pa.schema([("k", pa.int64()), ("ts", TIMESTAMP), ("__n", pa.int64())]),
    ),
    "rows": CountWindows(("k",), "ts", 4, 4, ROWS),
    "sliding": CountWindows(("k",), "ts", 5, 2, ROWS),
    "sessions": function(by_key=True),
}  # fmt: skip


class Run:
    """Steps of one shard. `merges`: whether each step merges all layers into one."""

    def __init__(
        self, operator: KeyedOperator, folder: Path, *, merges: bool | None = None
    ) -> None:
        self.operator, self.folder = operator, str(folder)
        self.merges = merges
        self.shard = Shard()
        self.steps = 0

    def step(self, rows: pa.Table, upto: int) -> pa.Table:
        self.steps += 1
        folder = f"p/op.{self.steps}"
        step = StepState(self.folder, folder, upto, {0: self.shard}, {}, 1 << 18, self.merges)
        assert StepState.of(step.text()) == step
        out, self.shard = run_shard(self.operator, 0, rows, step)
        return out

    def bytes(self) -> int:
        return sum(
            os.path.getsize(os.path.join(parent, name))
            for parent, _, names in os.walk(self.folder)
            for name in names
        )


def rows_of(rng: np.random.Generator, lo: int, hi: int, count: int, keys: int) -> pa.Table:
    times = np.sort(rng.integers(lo * WIDTH_US, (hi + 1) * WIDTH_US, count))
    picked = rng.integers(0, keys, count)
    null = rng.random(count) < 0.05
    return pa.table(
        [pa.array(times, TIMESTAMP), pa.array(picked, mask=null), rng.integers(0, 9, count) / 4],
        schema=ROWS,
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and layers with little data."""
    monkeypatch.setattr(layers, "BLOCK_ROWS", 3)
    monkeypatch.setattr(layers, "BLOCK_TIMERS", 2)
    monkeypatch.setattr(layers, "FANOUT", 3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(8))
def test_touched_keys_give_the_same_results_as_all_keys(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [Run(function(by_key=by_key), tmp_path / str(by_key)) for by_key in (True, False)]
    for run in runs:
        run.step(rows_of(np.random.default_rng(seed), 0, 0, 300, 200), 0)
    at, depth, results = 1, 0, 0
    for _ in range(60):
        last = at + int(rng.integers(0, 4))
        rows = rows_of(rng, at, last, int(rng.integers(0, 6)), 200 if rng.random() < 0.9 else 8)
        outs = [sort_canonical(run.step(rows, last), "ts") for run in runs]
        assert outs[0].equals(outs[1])
        timers = [run.shard.timer and run.shard.timer[0] for run in runs]
        assert runs[0].shard.rows == runs[1].shard.rows and timers[0] == timers[1]
        assert len(runs[1].shard.layers) == 1
        at, depth = last + 1, max(depth, len(runs[0].shard.layers))
        results += outs[0].num_rows
    assert depth > 3 and results > 50


@pytest.mark.usefixtures("small")
def test_count_windows_give_the_same_results_as_in_one_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = rows_of(rng, 0, 99, 2_000, 150)
    windows = CountWindows(("k",), "ts", 5, 2, ROWS)
    whole = Run(windows, tmp_path / "whole")
    expected = whole.step(rows, 99)
    run = Run(windows, tmp_path / "steps")
    buckets = rows["ts"].cast(pa.int64()).to_numpy() // WIDTH_US
    outs, depth = [], 0
    for bucket in range(100):
        outs.append(run.step(rows.filter(pa.array(buckets == bucket)), bucket))
        depth = max(depth, len(run.shard.layers))
    together = pa.concat_tables(outs)
    columns = [name for name in together.column_names if name != "__seq"]  # numbered in each step
    found, wanted = (sort_canonical(t.select(columns), "ts") for t in (together, expected))
    assert found.equals(wanted) and found.num_rows > 1_000
    assert run.shard.rows == whole.shard.rows
    assert depth > 2


def test_the_cost_of_a_step_follows_the_touched_keys(tmp_path: Path) -> None:
    """100,000 keys, of which each step touches 100: each is written a few times, with merges."""
    windows = CountWindows(("k",), "ts", 2, 2, ROWS)
    run = Run(windows, tmp_path)

    def rows(keys: Any, bucket: int) -> pa.Table:
        count = len(keys)
        times = np.full(count, bucket * WIDTH_US)
        return pa.table([pa.array(times, TIMESTAMP), keys, np.zeros(count)], schema=ROWS)

    run.step(rows(np.arange(100_000), 0), 0)
    base = run.bytes()
    rng = np.random.default_rng(2)
    for bucket in range(1, 301):
        run.step(rows(rng.permutation(100_000)[:100] + 100_000 * (bucket % 2), bucket), bucket)
    touched = 300 * 100 * base / 100_000
    assert run.bytes() - base < 3.2 * touched
    assert len(run.shard.layers) < 2 * layers.FANOUT + 4


def test_a_key_without_state_leaves_no_entry_in_the_oldest_layer(tmp_path: Path) -> None:
    run = Run(function(by_key=True), tmp_path)
    run.step(pa.table([pa.array([0, 1], TIMESTAMP), [2, 4], [0.0, 0.0]], schema=ROWS), 0)
    assert run.shard.timer is not None
    run.step(ROWS.empty_table(), 20)
    assert run.shard == Shard()


@pytest.mark.usefixtures("small")
def test_timers_that_were_moved_are_not_due(tmp_path: Path) -> None:
    run = Run(function(by_key=True), tmp_path)
    one = pa.table([pa.array([0], TIMESTAMP), [2], [0.0]], schema=ROWS)
    later = pa.table([pa.array([5 * WIDTH_US], TIMESTAMP), [2], [0.0]], schema=ROWS)
    others = pa.table([pa.array([0] * 9, TIMESTAMP), range(10, 28, 2), [0.0] * 9], schema=ROWS)
    run.step(pa.concat_tables([one, others]), 0)
    run.step(later, 5)
    assert run.shard.timer is not None and run.shard.timer[0] == GAP_US
    assert run.step(ROWS.empty_table(), 7).num_rows == 9  # and the old timer of key 2
    assert run.shard.timer is not None and run.shard.timer[0] == 5 * WIDTH_US + GAP_US
    assert run.step(ROWS.empty_table(), 12)["k"].to_pylist() == [2]
    assert run.shard.timer is None


def test_a_struct_that_is_not_null_can_be_removed(tmp_path: Path) -> None:
    """The entry of a removed key has only nulls."""
    inner = pa.struct([pa.field("a", pa.int32(), nullable=False)])
    state = pa.schema([("k", pa.int64()), ("s", inner)])

    def keep_odd(held: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
        keys = [key for key in rows["k"].to_pylist() if (key + info.bucket) % 2]
        structs = pa.array([{"a": 1}] * len(keys), inner)
        return OUT.empty_table(), pa.table([keys, structs], schema=state)

    operator = UserFunction(keep_odd, "f", "ts", None, state, OUT, WIDTH_US, ("k",))
    run = Run(operator, tmp_path)
    for bucket in range(4):
        times = pa.array([bucket * WIDTH_US] * 4, TIMESTAMP)
        run.step(pa.table([times, [0, 1, 2, 3], [0.0] * 4], schema=ROWS), bucket)
        assert run.shard.rows == 2


def test_keys_of_the_state_must_have_the_types_of_the_rows() -> None:
    def of(kind: pa.DataType) -> pa.Schema:
        return pa.schema([("k", kind)])

    assert has_keys(of(pa.int32()), of(pa.int64()), ("k",))
    assert has_keys(of(pa.string()), of(pa.string()), ("k",))
    assert not has_keys(of(pa.float32()), of(pa.float64()), ("k",))  # 0.1 is another number
    assert not has_keys(of(pa.string()), of(pa.string()), ("k", "other"))


def test_state_of_another_key_is_refused(tmp_path: Path) -> None:
    def other(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
        out, after = sessions(state, rows, info)
        return out, after.set_column(0, "k", pc.add(after["k"], 1))

    run = Run(function(by_key=True, fn=other), tmp_path)
    with pytest.raises(InputError, match="the state of a key that it was not called for"):
        run.step(rows_of(np.random.default_rng(4), 0, 0, 5, 4), 0)


@pytest.mark.usefixtures("small")
def test_every_flipped_bit_that_is_read_is_noticed(tmp_path: Path) -> None:
    run = Run(function(by_key=True), tmp_path)
    rng = np.random.default_rng(5)
    run.step(rows_of(rng, 0, 0, 60, 60), 0)
    for bucket in range(1, 6):
        run.step(rows_of(rng, bucket, bucket, 5, 60), bucket)
    assert len(run.shard.layers) > 2
    before, rows = run.shard, rows_of(rng, 6, 9, 200, 60)
    expected = run.step(rows, 9)
    noticed = 0
    for layer in before.layers:
        file = tmp_path / layer.file
        data = file.read_bytes()
        for bit in rng.integers(0, 8 * len(data), 40).tolist():
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            run.shard = before
            try:
                assert run.step(rows, 9).equals(expected)  # the block was not needed
            except LogCorrupted as err:
                noticed += f"{file.name} is damaged" in str(err)
        for size in (0, 1, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:size])
            run.shard = before
            with pytest.raises(LogCorrupted, match=f"{file.name} is damaged"):
                run.step(rows, 9)
        file.write_bytes(data)
    assert noticed > 60


def test_layers_are_merged_level_by_level() -> None:
    few = [0] * (layers.FANOUT - 1)
    assert layers.to_merge([0], [10], fixed=0, most=1e9) is None
    assert layers.to_merge([0, 0], [10, 9], fixed=0, most=1e9) is None
    assert layers.to_merge([0, 0], [10, 10], fixed=0, most=1e9) == (0, 2)
    assert layers.to_merge([0, 0], [10, 10], fixed=0, most=19) is None
    assert layers.to_merge([0, *few], [100, *few], fixed=0, most=1e9) is None
    full = [0] * layers.FANOUT
    assert layers.to_merge([0, *full], [100, *full], fixed=0, most=1e9) == (1, layers.FANOUT + 1)
    assert layers.to_merge([0, *full], [100, *full], fixed=2, most=1e9) is None
    ones = [1] * layers.FANOUT
    assert layers.to_merge([0, *ones, *few], [99, *ones, *few], fixed=0, most=1e9) == (
        1, 1 + layers.FANOUT,
    )  # fmt: skip
    many = [0] * (layers.FANOUT + 5)
    sizes = [1_000, *([10] * len(many))]
    assert layers.to_merge([0, *many], sizes, fixed=0, most=10 * layers.FANOUT) == (
        1, 1 + layers.FANOUT,
    )  # fmt: skip


def test_layers_without_obsolete_entries_are_not_merged_on_request() -> None:
    """Otherwise each step would write the whole shard again, while layers of other shards cannot be
    merged."""

    def merged(rows: int) -> tuple[int, int] | None:
        return layers.to_merge([1, 0], [1_000, 10], fixed=0, most=1e9, whole=True, rows=rows)

    assert merged(1_010) is None
    assert merged(900) == (0, 2)


def test_all_layers_become_one_if_this_is_requested() -> None:
    """To shorten recovery (CEC section III.A); otherwise for the speed of the steps."""
    levels, sizes = [0, 1, 0], [100, 2, 1]
    assert layers.to_merge(levels, sizes, fixed=0, most=1e9) is None
    assert layers.to_merge(levels, sizes, fixed=0, most=1e9, whole=True) == (0, 3)
    assert layers.to_merge(levels, sizes, fixed=0, most=102, whole=True) is None, "too many entries"
    assert layers.to_merge(levels, sizes, fixed=1, most=1e9, whole=True) is None, "under way"
    assert layers.to_merge([0], [10], fixed=0, most=1e9, whole=True) is None, "one already"
    assert layers.to_merge([], [], fixed=0, most=1e9, whole=True) is None


def test_recovery_may_prefer_many_layers_but_levels_are_still_merged() -> None:
    """While recovery is short enough, the oldest layer is not written again."""
    assert layers.to_merge([0, 0], [10, 10], fixed=0, most=1e9, whole=False) is None
    full = [0] * layers.FANOUT
    merge = layers.to_merge([0, *full], [1, *full], fixed=0, most=1e9, whole=False)
    assert merge == (1, layers.FANOUT + 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_do_not_depend_on_when_layers_are_merged(tmp_path: Path, operator: str) -> None:
    runs = [Run(OPERATORS[operator], tmp_path / str(m), merges=m) for m in (None, False, True)]
    rng, most, results = np.random.default_rng(6), [0, 0, 0], 0
    for bucket in range(80):
        rows = rows_of(rng, bucket, bucket, int(rng.integers(0, 12)), 40)
        outs = [sort_canonical(run.step(rows, bucket), "ts") for run in runs]
        assert outs[0].equals(outs[1]) and outs[0].equals(outs[2])
        assert len({(run.shard.rows, run.shard.timer) for run in runs}) == 1
        most = [max(n, len(run.shard.layers)) for n, run in zip(most, runs, strict=True)]
        results += outs[0].num_rows
    assert most[2] <= 3 < most[0] < most[1]
    assert results > 70


@pytest.mark.parametrize("seed", range(8))
def test_timers_are_read_as_they_were_written(seed: int, tmp_path: Path) -> None:
    """Runs of equal times, which are stored without them, and others between them."""
    rng = np.random.default_rng(seed)
    runs = [
        int(rng.choice([1, 3, layers.SAME_TIME_MIN - 1, layers.SAME_TIME_MIN, 2_500]))
        for _ in range(12)
    ]
    us = np.repeat(np.sort(rng.choice(1_000, len(runs), replace=False)) - 500, runs)
    hashes = np.sort(rng.integers(-(2**62), 2**62, len(us)))
    timers = np.zeros(len(us), layers.NO_TIMERS.dtype)
    timers["us"], timers["hash"] = rng.permutation(us), hashes
    numbers = np.arange(len(us))
    rows = pa.table([numbers, numbers, pa.array(timers["us"], TIMESTAMP)], schema=STATE)
    entries = layers.Entries(hashes, np.zeros(len(us), bool), rows)
    name = layers.LayerName(str(tmp_path), "p", "x")
    layer, without = (layers.write_layer(entries, timer, 0, name) for timer in ("due", None))
    with layers.LayerFile(str(tmp_path), layer, STATE) as file:
        for _ in range(20):
            lo, hi = np.sort(rng.integers(-600, 600, 2)).tolist()
            wanted = layers.in_order(timers[(timers["us"] >= lo) & (timers["us"] < hi)])
            assert (layers.in_order(file.timers(lo, hi, math.inf)) == wanted).all()
    sizes = [(tmp_path / written.file).stat().st_size for written in (layer, without)]
    assert 8 * len(us) < sizes[0] - sizes[1] < 16 * len(us)
