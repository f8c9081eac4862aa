"""Run the killed network over fixed rows on a given master; print the digest of every output."""

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
from holdfast.storage.rows import digest
from tests.processes.kill_app import net

BUCKETS = 25


def main(master: str, storage: str) -> None:
    found: dict[str, list[pa.Table]] = {op.name: [] for op in net.outputs}
    with Run(net, storage=storage, options=Options(master=master, memory="1g")) as run:
        readers = []
        for name in found:
            client = run.client(name)
            take = found[name]
            readers.append(
                threading.Thread(
                    target=client.foreach_bucket,
                    args=(lambda table, info, take=take: take.append(table),),
                )
            )
            readers[-1].start()
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
        until = time.monotonic() + 240
        while any(reader.is_alive() for reader in readers) and time.monotonic() < until:
            run.raise_failure()
            time.sleep(0.05)
        executors = 0
        if master.startswith("spark://"):
            context = SparkContext.getOrCreate()
            executors = context._jsc.sc().getExecutorMemoryStatus().size() - 1
    told = {
        name: [sum(t.num_rows for t in tables), digest(pa.concat_tables(tables))]
        for name, tables in found.items()
    }
    print(json.dumps({"outputs": told, "executors": executors}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
