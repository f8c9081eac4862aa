"""Run the network of `kill_app` over fixed rows on a given master; print the digest of every
output."""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np
import pyarrow as pa
from pyspark import SparkContext

from holdfast.config import Options
from holdfast.runtime.running import Run
from holdfast.spark_settings import parse_settings
from holdfast.storage.rows import digest
from tests.processes.kill_app import net

BUCKETS = 25


def main(master: str, storage: str, *conf: str) -> None:
    options = Options(master=master, memory="1g", spark=parse_settings(conf))
    tables_of: dict[str, list[pa.Table]] = {op.name: [] for op in net.outputs}
    with Run(net, storage=storage, options=options) as run:
        threads = []
        for name in tables_of:
            client = run.client(name)
            take = tables_of[name]
            threads.append(
                threading.Thread(
                    target=client.foreach_bucket,
                    args=(lambda table, info, take=take: take.append(table),),
                )
            )
            threads[-1].start()
        for number, source in enumerate(run.sources.values()):
            source.start(0)
            for bucket in range(BUCKETS):
                rng = np.random.default_rng([bucket, number])
                source.push(
                    {"ts": rng.integers(bucket * 100_000, (bucket + 1) * 100_000, 50),
                     "key": np.char.add("k", rng.integers(0, 20, 50).astype(str)),
                     "x": rng.random(50) * 10.0 ** rng.integers(-9, 9, 50)}
                )  # fmt: skip
                source.advance((bucket + 1) * 100_000)
        for source in run.sources.values():
            source.end()
        deadline_s = time.monotonic() + 240
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline_s:
            run.raise_failure()
            time.sleep(0.05)
        executors = 0
        if master.startswith("spark://"):
            context = SparkContext.getOrCreate()
            executors = context._jsc.sc().getExecutorMemoryStatus().size() - 1
    digests = {
        name: [sum(t.num_rows for t in tables), digest(pa.concat_tables(tables))]
        for name, tables in tables_of.items()
    }
    print(json.dumps({"outputs": digests, "executors": executors}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
