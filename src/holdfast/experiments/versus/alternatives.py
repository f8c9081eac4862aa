"""Ways to fold a bucket of 200,000 rows and 10,000 keys, other than a prepared plan in one task.

`python -m holdfast.experiments.versus.alternatives`: the ways take turns; median and range of five
rounds of 20 jobs, after two rounds of warm-up.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.config import Options
from holdfast.engine import session
from holdfast.storage.rows import TIMESTAMP

ROWS, KEYS = 200_000, 10_000
WARM_ROUNDS, ROUNDS, JOBS = 2, 5, 20


def bucket() -> pa.Table:
    rng = np.random.default_rng(1)
    return pa.table(
        {"ts": pa.array(np.sort(rng.integers(0, 100_000, ROWS)), TIMESTAMP),
         "src": np.char.add("10.0.", rng.integers(0, KEYS, ROWS).astype(str)),
         "bytes": rng.integers(0, 1_500, ROWS)}
    )  # fmt: skip


def ways(spark: Any, folder: str) -> dict[str, Callable[[], pa.Table]]:
    rows, whole, halves = bucket(), f"{folder}/all", (f"{folder}/first", f"{folder}/second")
    pq.write_table(rows, whole)
    for number, half in enumerate(halves):
        pq.write_table(rows.slice(number * ROWS // 2, ROWS // 2), half)

    def folded(*files: str, tasks: int) -> Any:
        read = spark.read.parquet(*files)
        read = read.coalesce(1) if tasks == 1 else read
        return read.groupBy("src").agg({"*": "count", "bytes": "sum"})

    prepared = folded(whole, tasks=1)
    of_halves = [folded(half, tasks=1) for half in halves]
    pool = ThreadPoolExecutor(2)

    def concurrent() -> pa.Table:
        both = pa.concat_tables(pool.map(lambda half: half.toArrow(), of_halves))
        key, *partials = both.column_names
        return both.group_by(key).aggregate([(partial, "sum") for partial in partials])

    return {
        "prepared plan, one task (as a step does)": prepared.toArrow,
        "planned again, one task": lambda: folded(whole, tasks=1).toArrow(),
        "planned again, two tasks and a shuffle": lambda: folded(*halves, tasks=2).toArrow(),
        "two prepared plans at once, merged by Arrow": concurrent,
        "Arrow in the driver, without Spark": lambda: (
            pq.read_table(whole).group_by("src").aggregate([([], "count_all"), ("bytes", "sum")])
        ),
    }


def main() -> None:
    sessions = session.start(Options(master="local[2]"))
    spark = sessions.small
    # As for steps of this size (docs/design/0014-prepared-plans.md).
    spark.conf.set("spark.sql.codegen.wholeStage", "true")
    spark.conf.set("spark.sql.codegen.factoryMode", "FALLBACK")
    with tempfile.TemporaryDirectory(prefix="holdfast-alternatives-") as folder:
        compared = ways(spark, folder)
        medians: dict[str, list[float]] = {name: [] for name in compared}
        for number in range(WARM_ROUNDS + ROUNDS):
            for name, run in compared.items():
                took_ms = []
                for _ in range(JOBS):
                    began = time.perf_counter()
                    assert run().num_rows == KEYS
                    took_ms.append(1_000 * (time.perf_counter() - began))
                if number >= WARM_ROUNDS:
                    medians[name].append(statistics.median(took_ms))
    for name, of in medians.items():
        print(f"{name}: {statistics.median(of):.0f} ms ({min(of):.0f} to {max(of):.0f})")
    sessions.stop()


if __name__ == "__main__":
    main()
