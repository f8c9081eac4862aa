"""Run a network with keyed state many times on a cluster while Python workers and executors are
killed and slow tasks run twice; print the digests that differ."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.config import Options
from holdfast.engine import session
from holdfast.spark_settings import parse_settings
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import digests, run_network
from tests.processes.kill_app import totals

BUCKETS, ROWS, KEYS = 4, 300, 40
#: Time between two kills of executors: each starts a JVM, in which tasks run slowly at first.
EXECUTOR_REST_S = 20.0


def slow(state: pa.Table, rows: pa.Table, info: Any, *, calls: str) -> tuple[pa.Table, pa.Table]:
    """`totals`; some calls are slow, so that Spark runs their tasks twice."""
    first = rows["key"][0].as_py() if rows.num_rows else "none"
    (Path(calls) / f"{info.bucket}-{first}.{uuid.uuid4().hex}").touch()
    if random.random() < 0.1:
        threading.Event().wait(0.5)
    return totals(state, rows, info)


def network(calls: str) -> hf.Network:
    net = hf.Network("killed", bucket="100ms", partitions=4)
    rows = net.source("a", "ts timestamp, key string, x double", time="ts")
    net.output("counts", rows.count_window(7, by="key").agg(x=hf.sum("x"), last=hf.last("x")))
    windows = rows.window("300ms", slide="100ms").group_by("key")
    net.output("windows", windows.agg(n=hf.count(), x=hf.sum("x")))
    net.output(
        "totals",
        rows.stateful(partial(slow, calls=calls), key="key", state="key string, total long",
                      out="key string, total long, ts timestamp"),
    )  # fmt: skip
    return net


def input_rows() -> pa.Table:
    rng = np.random.default_rng(1)
    count = BUCKETS * ROWS
    return pa.table({
        "ts": pa.array(np.sort(rng.integers(0, BUCKETS * 100_000, count)), TIMESTAMP),
        "key": np.char.add("k", rng.integers(0, KEYS, count).astype(str)),
        "x": rng.random(count) * 10.0 ** rng.integers(-9, 9, count),
    })  # fmt: skip


class Killer:
    """Kills Python workers of an application, and now and then an executor."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._stopped = threading.Event()
        self.kills: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rng, rest_until_s = random.Random(1), 0.0
        while not self._stopped.wait(rng.uniform(0.3, 1.5)):
            executors = [pid for pid, _, line in processes() if f"--app-id {self._app}" in line]
            workers = [p for p, parent, line in processes() if "pyspark.daemon" in line
                       and (parent in executors or self._parent(parent) in executors)]  # fmt: skip
            kind, pids = "worker", workers
            if rng.random() < 0.05 and time.monotonic() > rest_until_s:
                kind, pids = "executor", executors
                rest_until_s = time.monotonic() + EXECUTOR_REST_S
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    self.kills[kind] += 1

    def _parent(self, pid: int) -> int | None:
        return next((parent for p, parent, _ in processes() if p == pid), None)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def processes() -> list[tuple[int, int, str]]:
    """Process id, id of the parent and command line of all processes."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                stat = Path("/proc", name, "stat").read_text()
                found.append((int(name), int(stat.rsplit(")", 1)[1].split()[1]), line))
    return found


def main(master: str, folder: str, runs: str, *conf: str) -> None:
    calls = Path(folder, "calls")
    calls.mkdir()
    net, tables = network(str(calls)), {"a": input_rows()}
    sessions = session.start(Options(master=master, memory="1g", spark=parse_settings(conf)))
    expected = digests(run_network(net, tables, sessions))
    killer = Killer(sessions.small.sparkContext.applicationId)
    differences = []
    for number in range(int(runs)):
        groups = (1 + number % 4,)
        found = digests(run_network(net, tables, sessions, groups=groups, jobs="large"))
        if found != expected:
            differences.append([number, found])
        print(f"run {number + 1}: {len(differences)} differ, {dict(killer.kills)} killed",
              file=sys.stderr, flush=True)  # fmt: skip
    killer.stop()
    # In every run, the function is called once for each bucket of each shard.
    names = Counter(path.name.split(".")[0] for path in calls.iterdir())
    repeated = sum(names.values()) - len(names) * (int(runs) + 1)
    report = {"differences": differences, "kills": killer.kills, "repeated": repeated}
    print(json.dumps(report), flush=True)
    sessions.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
