"""Keyed state in layers against a model: random functions, keys, groups of buckets, merges of which
the result is used later, and repeated steps. No JVM."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.engine import layers
from holdfast.engine.keyed import StepState, run_shard
from holdfast.engine.keyed_operators import UserFunction
from holdfast.engine.state import Layer, Shard
from holdfast.storage.rows import TIMESTAMP, sort_canonical

WIDTH_US = 1_000
OUT = pa.schema([("ts", TIMESTAMP), ("key", pa.string()), ("n", pa.int64()), ("of", pa.int64())])
INF, NAN = math.inf, math.nan
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [None, *range(30)]),
    "double": (pa.float64(), [None, NAN, 0.0, -0.0, INF, 1.5, *map(float, range(2, 12))]),
    "string": (pa.string(), [None, "", "\0", "a", "aa", *(f"k{n}" for n in range(20))]),
    "decimal": (pa.decimal128(10, 2), [None, *(Decimal(n) / 4 for n in range(-6, 12))]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [
            None,
            {"a": None, "b": None},
            {"a": 1, "b": None},
            *({"a": n, "b": "x"} for n in range(9)),
        ],
    ),
}


def spelled(key: Any) -> str:
    return repr(key + 0.0) if isinstance(key, float) else repr(key)


class Function:
    """Adds, moves and removes rows of state and timers, as the rows say. Remembers its calls."""

    def __init__(self, state: pa.Schema) -> None:
        self._schema = state
        self.calls: list[Any] = []

    def __call__(self, state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
        times = state["due"].cast(pa.int64()).to_pylist()
        held: list[Any] = list(
            zip(state["k"].to_pylist(), state["n"].to_pylist(), times, strict=True)
        )
        self.calls.append((info.bucket, [(spelled(k), n, due) for k, n, due in held],
                           rows["x"].to_pylist()))  # fmt: skip
        of_key: dict[str, list[list[Any]]] = {}
        for row in held:
            of_key.setdefault(spelled(row[0]), []).append(list(row))
        out = []
        for key, group in of_key.items():
            kept = []
            for row in group:
                if row[2] is None or row[2] >= info.end_us:
                    kept.append(row)
                    continue
                out.append({"ts": info.start_us, "key": key, "n": row[1], "of": len(group)})
                if row[1] % 3 == 0:  # the timer is set again
                    kept.append([row[0], row[1] + 1, info.end_us + row[1] * 37 % 5_000])
                elif row[1] % 3 == 1:
                    kept.append([row[0], row[1], None])
            of_key[key] = kept
        for key, x in zip(rows["k"].to_pylist(), rows["x"].to_pylist(), strict=True):
            group = of_key.setdefault(spelled(key), [])
            match x % 6:
                case 0:
                    group.clear()
                case 1:
                    group.append([key, x, None])
                case 2:
                    group.insert(0, [key, x, info.end_us])
                case 3:
                    group.append([key, x, info.end_us + x * 13 % 20_000])
                case 4 if group:
                    group[-1][2] = info.end_us + x % 3_000
                case _ if group:
                    group.pop(0)
        flat = [row for group in of_key.values() for row in group]
        plain = OUT.set(0, pa.field("ts", pa.int64()))
        columns = [pa.array([row[place] for row in flat], field.type)
                   for place, field in enumerate(self._schema)]  # fmt: skip
        return (
            pa.Table.from_pylist(out, plain).cast(OUT),
            pa.Table.from_arrays(columns, schema=self._schema),
        )


class Layered:
    """A shard whose merges beside the steps take a while."""

    def __init__(self, operator: UserFunction, folder: Path, step_max: int) -> None:
        self._operator, self._folder, self._step_max = operator, str(folder), step_max
        self.shard = Shard()
        self._steps = 0
        #: Layers that are merged, and the result.
        self._merge: tuple[tuple[Layer, ...], Layer | None] | None = None

    def step(self, rows: pa.Table, upto: int, rng: random.Random) -> pa.Table:
        shard, fixed = self.shard, 0
        if self._merge is not None:
            merged, result = self._merge
            first = shard.layers.index(merged[0])
            end = first + len(merged)
            assert shard.layers[first:end] == merged
            fixed = end
            if rng.random() < 0.3:
                new = () if result is None else (result,)
                layers_after = (*shard.layers[:first], *new, *shard.layers[end:])
                shard, fixed = Shard(layers_after, shard.rows, shard.timer), 0
                self._merge = None
        merges = rng.choice([None, None, False, True])
        for _ in range(rng.choice([1, 1, 2])):  # a step may be repeated
            out, after = self.run(shard, rows, upto, fixed, merges)
        self.shard = after
        if self._merge is None:
            self._start_merge(merges)
        return out

    def run(
        self, shard: Shard, rows: pa.Table, upto: int, fixed: int = 0, merges: bool | None = None
    ) -> tuple[pa.Table, Shard]:
        self._steps += 1
        folder = f"p/op.{self._steps}"
        step = StepState(self._folder, folder, upto, {0: shard}, {0: fixed}, self._step_max, merges)
        return run_shard(self._operator, 0, rows, StepState.of(step.text()))

    def _start_merge(self, whole: bool | None) -> None:
        held = self.shard.layers
        due = layers.to_merge(
            [layer.level for layer in held], [layer.entries for layer in held], fixed=0,
            most=math.inf, whole=whole,
        )  # fmt: skip
        if due is not None:
            chosen = held[slice(*due)]
            name = layers.LayerName(self._folder, f"p/merged.{self._steps}", "shard-0")
            state = self._operator.state
            result = layers.merge_layers(chosen, None, state, "due", name, oldest=due[0] == 0)
            self._merge = (chosen, result)


@pytest.mark.parametrize("seed", range(20))
def test_layers_give_the_same_results_as_one_bucket_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(layers, "BLOCK_ROWS", rng.choice([1, 2, 3, 256]))
    monkeypatch.setattr(layers, "BLOCK_TIMERS", rng.choice([1, 2, 5, 1024]))
    monkeypatch.setattr(layers, "NEXT_TIMERS", rng.choice([1, 2, 64]))
    monkeypatch.setattr(layers, "FANOUT", rng.choice([2, 3, 5]))
    kind, keys = KEYS[rng.choice(list(KEYS))]
    schema = pa.schema([("ts", TIMESTAMP), ("k", kind), ("x", pa.int64())])
    state = pa.schema([("k", kind), ("n", pa.int64()), ("due", TIMESTAMP)])
    functions = [Function(state), Function(state)]
    operators = [
        UserFunction(fn, "f", "ts", "due", state, OUT, WIDTH_US, ("k",)) for fn in functions
    ]
    layered = Layered(operators[0], tmp_path / "layered", rng.choice([0, 3, 20, 1 << 18]))
    plain = Layered(operators[1], tmp_path / "plain", 1 << 40)
    at = rng.choice([0, -40, -2_000])
    for _ in range(40):
        last = at + rng.choice([0, 0, 0, 1, 3, 6])
        count = rng.choice([0, 0, 1, 3, 8])
        times = sorted(rng.randrange(at * WIDTH_US, (last + 1) * WIDTH_US) for _ in range(count))
        columns = [pa.array(times, TIMESTAMP), pa.array(rng.choices(keys, k=count), kind),
                   pa.array([rng.randrange(10_000) for _ in range(count)], pa.int64())]  # fmt: skip
        rows = pa.Table.from_arrays(columns, schema=schema)
        found = layered.step(rows, last, rng)
        calls = functions[0].calls
        expected = []
        for bucket in range(at, last + 1):
            inside = [number for number, time in enumerate(times) if time // WIDTH_US == bucket]
            part = rows.take(pa.array(inside, pa.int64()))
            expected.append(plain.run(plain.shard, part, bucket))
            plain.shard = expected[-1][1]
        outs = pa.concat_tables([out for out, _ in expected])
        assert sort_canonical(found, "ts").equals(sort_canonical(outs, "ts"))
        wanted = functions[1].calls
        assert calls[len(calls) - len(wanted) :] == wanted
        assert layered.shard.rows == plain.shard.rows
        assert layered.shard.timer == plain.shard.timer
        for function in functions:
            function.calls = []
        at = last + 1
