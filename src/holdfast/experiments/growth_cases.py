"""The queries of the growth curves: one dimension each, everything else fixed.

Buckets are 1 s, and every window slides by one bucket, so that every step both folds new rows and
gives results. One process with its own JVM measures one dimension: `python -m` with the job as
JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.experiments.growth_bench import Bench, Case, Effort, memory_mb, peak_mb
from holdfast.experiments.versus.workload import EPOCH_US

WIDTH_US = 1_000_000
FIRST = EPOCH_US // WIDTH_US
#: Rows of a bucket and keys, where these are not the dimension.
ROWS, KEYS = 1_000, 100
#: Rows per second of each side of a join.
JOIN_ROWS = 5_000
#: Keys that a step touches, and most keys that are loaded in one step.
TOUCHED, LOAD_ROWS = 1_000, 1_000_000
#: Rows of a bucket of each source, if there are many sources.
SOURCE_ROWS = 100
#: Columns of the source of many outputs.
OUTPUTS_MAX = 20
TIMESTAMP = pa.timestamp("us", tz="UTC")


def _stamped(bucket: int, offsets_us: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(offsets_us + bucket * WIDTH_US, pa.int64()).cast(TIMESTAMP)


@cache
def _made(rows: int, keys: int, columns: int) -> tuple[np.ndarray[Any, Any], pa.Table]:
    """Rows without their times: the buckets of a case differ only in the times."""
    rng = np.random.default_rng(rows)
    names = pa.array([f"src-{key:06d}" for key in range(keys)])
    made = {"src": names.take(pa.array(rng.integers(0, keys, rows)))}
    for number in range(columns):
        made[f"c{number}"] = pa.array(rng.integers(40, 1_500, rows), pa.int64())
    return np.sort(rng.integers(0, WIDTH_US, rows)), pa.table(made)


def _flows(bucket: int, rows: int = ROWS, keys: int = KEYS, columns: int = 1) -> pa.Table:
    offsets_us, made = _made(rows, keys, columns)
    return made.add_column(0, pa.field("ts", TIMESTAMP), _stamped(bucket, offsets_us))


def _schema(columns: int = 1) -> str:
    return "ts timestamp, src string" + "".join(f", c{n} long" for n in range(columns))


def _network() -> hf.Network:
    return hf.Network("growth", bucket="1s")


def rows(x: int) -> Case:
    net = _network()
    flows = net.source("flows", _schema(), time="ts")
    windows = flows.window("2s", slide="1s").group_by("src")
    net.output("result", windows.agg(n=hf.count(), total=hf.sum("c0")))
    return Case(net, lambda _, bucket: _flows(bucket, rows=x), FIRST)


def totals(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """The running total of each key, from its second row on. The state of a key has one row, so a
    key that is touched often costs no more than others."""
    ones = pa.array(np.ones(rows.num_rows, np.int64))
    new = pa.table({"key": rows["key"], "ts": rows["ts"], "n": ones, "total": rows["bytes"]})
    both = pa.concat_tables([state.cast(new.schema), new]).group_by("key", use_threads=False)
    sums = both.aggregate([("ts", "max"), ("n", "sum"), ("total", "sum")])
    held = sums.select(["key", "ts_max", "n_sum", "total_sum"]).rename_columns(new.column_names)
    again = held["n"].to_numpy() > 1
    return held.filter(pa.array(again)).select(["ts", "key", "total"]), held


def keys(x: int) -> Case:
    """Loads x keys, then touches `TOUCHED` uniformly chosen ones in each bucket."""
    net = _network()
    flows = net.source("flows", "ts timestamp, key long, bytes long", time="ts")
    running = flows.stateful(
        totals, key="key", state="key long, ts timestamp, n long, total long",
        out="ts timestamp, key long, total long",
    )  # fmt: skip
    net.output("result", running)
    load = max(1, -(-x // LOAD_ROWS))

    def made(_: str, bucket: int) -> pa.Table:
        number = bucket - FIRST
        rng = np.random.default_rng([x, number])
        if number < load:
            chosen = np.arange(number * x // load, (number + 1) * x // load)
        else:
            chosen = rng.choice(x, min(x, TOUCHED), replace=False, shuffle=False)
        offsets_us = np.sort(rng.integers(0, WIDTH_US, len(chosen)))
        values = rng.integers(40, 1_500, len(chosen))
        return pa.table({"ts": _stamped(bucket, offsets_us), "key": chosen, "bytes": values})

    return Case(net, made, FIRST, history=load, group=1)


def _sliding(size_s: int, slide_s: int) -> hf.Network:
    net = _network()
    flows = net.source("flows", _schema(), time="ts")
    windows = flows.window(f"{size_s}s", slide=f"{slide_s}s", name="windows").group_by("src")
    net.output("result", windows.agg(n=hf.count(), total=hf.sum("c0")))
    return net


def window(x: int) -> Case:
    """Windows of x seconds. Their history is built by windows of the same length and panes that
    slide by x - 1 seconds: none of them closes meanwhile, which would take longer than the
    measurement."""
    if x <= 2:
        return Case(_sliding(x, 1), lambda _, bucket: _flows(bucket), FIRST, counted=x * ROWS)
    first = -(-FIRST // (x - 1)) * (x - 1)
    return Case(
        _sliding(x, 1), lambda _, bucket: _flows(bucket), first, history=x - 2,
        builder=_sliding(x, x - 1), counted=x * ROWS,
    )  # fmt: skip


def _joined(bound_s: int) -> hf.Network:
    net = _network()
    left = net.source("left", "ts timestamp, key long, l long", time="ts")
    right = net.source("right", "ts timestamp, key long, r long", time="ts")
    net.output("result", left.join(right, on=["key"], within=f"{bound_s}s"))
    return net


def _side(stream: str, bucket: int, count: int) -> pa.Table:
    """Each key occurs once on each side, in the same bucket: the bound of the join does not change
    the results."""
    rng = np.random.default_rng([bucket, stream == "left"])
    offsets_us = np.sort(rng.integers(0, WIDTH_US, count))
    chosen = (bucket - FIRST) * 1_000_000 + rng.permutation(count)
    times = _stamped(bucket, offsets_us)
    return pa.table({"ts": times, "key": chosen, stream[0]: rng.integers(0, 1_000, count)})


def join_bound(x: int) -> Case:
    return Case(
        _joined(x), lambda stream, bucket: _side(stream, bucket, JOIN_ROWS), FIRST, history=x,
        group=50, builder=_joined(x),
    )  # fmt: skip


def history(x: int) -> Case:
    """A join with x rows of history and `ROWS` new rows per side and bucket."""
    buckets = 50

    def made(stream: str, bucket: int) -> pa.Table:
        count = x // (2 * buckets) if bucket < FIRST + buckets else ROWS
        return _side(stream, bucket, count)

    return Case(_joined(600), made, FIRST, history=buckets, group=10, builder=_joined(600))


def columns(x: int) -> Case:
    """x columns: the time, the key, and columns that are summed."""
    net = _network()
    flows = net.source("flows", _schema(x - 2), time="ts")
    sums = {f"s{n}": hf.sum(f"c{n}") for n in range(x - 2)}
    windows = flows.window("2s", slide="1s").group_by("src")
    net.output("result", windows.agg(n=hf.count(), **sums))
    return Case(net, lambda _, bucket: _flows(bucket, columns=x - 2), FIRST)


def outputs(x: int) -> Case:
    """x outputs, each with windows of its own, over one source. They have no job in common, because
    each sums another column."""
    net = _network()
    flows = net.source("flows", _schema(OUTPUTS_MAX), time="ts")
    for number in range(x):
        windows = flows.window(f"{2 + number % 4}s", slide="1s").group_by("src")
        totals = windows.agg(n=hf.count(), **{f"total{number}": hf.sum(f"c{number}")})
        net.output(f"result{number}", totals)
    return Case(net, lambda _, bucket: _flows(bucket, columns=OUTPUTS_MAX), FIRST)


def sources(x: int) -> Case:
    """The union of x sources with `SOURCE_ROWS` rows each."""
    net = _network()
    feeds = [net.source(f"flows{n}", _schema(), time="ts") for n in range(x)]
    united = net.union(*feeds) if x > 1 else feeds[0]
    windows = united.window("2s", slide="1s").group_by("src")
    net.output("result", windows.agg(n=hf.count(), total=hf.sum("c0")))
    return Case(net, lambda _, bucket: _flows(bucket, rows=SOURCE_ROWS), FIRST)


def partitions(x: int) -> Case:
    """x partitions of a fragment: the time is the sum over all of them, with the routing."""
    net = _network()
    flows = net.source("flows", _schema(), time="ts")
    parted = flows.on("stats", by="src", partitions=x)
    windows = parted.window("2s", slide="1s").group_by("src")
    net.output("result", windows.agg(n=hf.count(), total=hf.sum("c0")))
    return Case(net, lambda _, bucket: _flows(bucket), FIRST)


CASES: dict[str, Callable[[int], Case]] = {
    "rows": rows, "keys": keys, "window": window, "join_bound": join_bound, "columns": columns,
    "outputs": outputs, "sources": sources, "partitions": partitions, "history": history,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """The points of one dimension."""

    dimension: str
    xs: tuple[int, ...]
    #: Sizes that are measured even if the time is over; the first four always are.
    required: tuple[int, ...] = ()
    seconds: float = 120.0
    warm: int = 20
    steps: int = 40
    point_s: float = 12.0
    #: Steps of the largest required size, if more than the others have.
    last_steps: int = 0
    #: Whether the smallest size is measured twice: the first time warms the JVM up.
    warm_jvm: bool = True
    #: Where temporary folders are created; the parent process deletes it, even after a kill.
    folder: str | None = None

    def effort(self, x: int) -> Effort:
        least = self.last_steps if x == max(self.xs) else 0
        return Effort(self.warm, max(self.steps, least), max(5, least), self.point_s)


def run_job(job: Job, say: Callable[[str], None]) -> dict[str, Any]:
    from holdfast.engine import session

    options = hf.Options()
    sessions = session.start(options)
    began, points, skipped = time.monotonic(), [], []
    start_mb = memory_mb(sessions)
    with peak_mb() as peak:
        for number, x in enumerate((job.xs[0],) * job.warm_jvm + job.xs):
            over = time.monotonic() - began > job.seconds
            if over and number >= 4 + job.warm_jvm and x not in job.required:
                skipped.append(x)
                continue
            folder = tempfile.mkdtemp(prefix="holdfast-growth-", dir=job.folder)
            began_point = time.monotonic()
            try:
                bench = Bench(CASES[job.dimension](x), sessions, folder)
                bench.build_history()
                history_s = round(time.monotonic() - began_point, 1)
                point = {"x": x, **bench.measure(job.effort(x)), "history_s": history_s}
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                _made.cache_clear()
            if number >= job.warm_jvm:
                points.append(point)
            say(f"{job.dimension} {x:,}: {point['step_ms']:.1f} ms per step (p99 "
                f"{point['step_ms_p99']:.1f}, {point['steps']} steps), {point['bytes_written']:,} "
                f"bytes, {point['files']} files, history in {history_s} s, point in "
                f"{time.monotonic() - began_point:.1f} s")  # fmt: skip
        heap_mb = max(point["memory_mb"]["heap"] for point in points)
        memory = {
            "heap_mb": heap_mb, "python_peak_mb": peak(), "python_start_mb": start_mb["python"],
            "limit_mb": options.memory_bytes / 2**20,
        }  # fmt: skip
    sessions.stop()
    return {"job": asdict(job), "points": points, "skipped": skipped, "memory": memory}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["xs"], given["required"] = tuple(given["xs"]), tuple(given.get("required", ()))
    found = run_job(Job(**given), lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(found), flush=True)
