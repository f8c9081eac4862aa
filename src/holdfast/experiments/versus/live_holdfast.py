"""Holdfast from end to end: source log, fsync, transport and client, while rows arrive.

The networks run in the default mode. The delay of an update is that of a window of one bucket, the
smallest unit of Holdfast; its result is final when it arrives. The delay of a final result is that
of a window of 1 s, from the end of the window to the client.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo
from holdfast.errors import HoldfastError
from holdfast.experiments.versus.workload import WIDTH_US
from holdfast.runtime.running import Run
from holdfast.types import Stability

KEYS = 100
#: Interval between two pushes of the source, in seconds.
PUSH_EVERY_S = 0.01
APP = "holdfast.experiments.versus.live_holdfast"


def network(replicas: int = 1) -> hf.Network:
    net = hf.Network("versus-live", bucket="100ms")
    # Rows are pushed as soon as they are stamped. A row whose bucket ends in between is restamped.
    flows = net.source(
        "flows", "ts timestamp, src string, bytes long", time="ts", grace="0s", late="restamp"
    )
    for output, size in (("updates", "100ms"), ("final", "1s")):
        windows = flows.window(size).group_by("src")
        net.output(output, windows.agg(n=hf.count(), bytes=hf.sum("bytes")))
    if replicas > 1:
        net.protect("main", replicas=replicas)
    return net


one = network(1)
two = network(2)


@dataclass(slots=True)
class Delivered:
    """A bucket with results at the client."""

    received_at_us: int
    bucket: int
    rows: int
    #: Rows of the source that the results count.
    counted: int
    keys: tuple[str, ...]


class _Recorder(threading.Thread):
    """Application that records the results of an output."""

    def __init__(self, run: Run, output: str) -> None:
        super().__init__(name=f"recorder-{output}", daemon=True)
        self.client = run.client(output)
        self.delivered: list[Delivered] = []
        self.start()

    def run(self) -> None:
        self.client.foreach_bucket(self._take)

    def _take(self, table: Any, info: BucketInfo) -> None:
        if info.rec_done or info.stability is not Stability.STABLE or not table.num_rows:
            return
        counted = int(np.sum(table["n"].to_numpy()))
        self.delivered.append(
            Delivered(info.received_at_us, info.bucket, table.num_rows, counted,
                      tuple(table["src"].to_pylist()))
        )  # fmt: skip


class _Pusher(threading.Thread):
    """Pushes `rows` rows, stamped with the current time, every `every_s`."""

    def __init__(self, run: Run, rows: int, every_s: float = PUSH_EVERY_S) -> None:
        super().__init__(name="pusher", daemon=True)
        (self._source,) = run.sources.values()
        self._rows, self._every_s = rows, every_s
        self._done = threading.Event()
        #: Rows of a push, whose first key is the number of the push.
        self._src = [np.char.mod("src-%03d", (np.arange(rows) + at) % KEYS) for at in range(KEYS)]
        self._bytes = np.arange(rows)
        self.pushed = 0
        self.start()

    def run(self) -> None:
        number = 0
        while not self._done.wait(self._every_s):
            src = self._src[number % KEYS]
            at = np.full(self._rows, now_us())
            self._source.push({"ts": at, "src": src, "bytes": self._bytes})
            number += self._rows
            self.pushed += self._rows

    def stop(self, *, end: bool = True) -> None:
        """Stop pushing, and end the source, so that the last window closes."""
        self._done.set()
        self.join()
        if end:
            self._source.end()


def measure_delays(rows_per_s: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """Delays of updates and of final results, at a constant rate."""
    with Run(network(), options=hf.Options(archive=False)) as run:
        recorders = {output: _Recorder(run, output) for output in ("updates", "final")}
        pusher = _Pusher(run, max(1, int(rows_per_s * PUSH_EVERY_S)))
        time.sleep(warm_s)
        since_us = now_us()
        time.sleep(seconds)
        until_us = now_us()
        pusher.stop()
        for recorder in recorders.values():
            recorder.join(timeout=30)
        run.raise_failure()

    def late_ms(output: str, after_start_us: int) -> list[float]:
        """Delay from a moment in the bucket, given from its start."""
        return [
            (one.received_at_us - one.bucket * WIDTH_US - after_start_us) / 1_000
            for one in recorders[output].delivered
            if since_us <= one.received_at_us <= until_us
        ]

    updates, final = late_ms("updates", WIDTH_US // 2), late_ms("final", WIDTH_US)
    return {"update_ms": statistics.median(updates), "final_ms": statistics.median(final),
            "final_ms_all": final}  # fmt: skip


def measure_rate(warm_s: float, seconds: float, push_rows: int = 20_000) -> float:
    """Rows per second that arrive in final results, if the source pushes as fast as it can."""
    with Run(network(), options=hf.Options(archive=False)) as run:
        recorder = _Recorder(run, "final")
        slow = _Pusher(run, 10)
        time.sleep(warm_s)
        slow.stop(end=False)
        began = time.perf_counter()
        fast = _Pusher(run, push_rows, every_s=0.0)
        time.sleep(seconds)
        fast.stop()
        recorder.join(timeout=60)
        took = time.perf_counter() - began
        run.raise_failure()
    counted = sum(one.counted for one in recorder.delivered)
    if counted != slow.pushed + fast.pushed:
        pushed = slow.pushed + fast.pushed
        raise HoldfastError(f"pushed {pushed} rows, results count {counted}")
    return fast.pushed / took


def measure_kill(replicas: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """SIGKILL of the replica that the client reads; its supervisor restarts it."""
    storage = tempfile.mkdtemp(prefix="holdfast-")
    options = hf.Options(memory="1g", master="local[1]", archive=False)
    running = Run(
        network(replicas), storage=storage, deployment="processes", options=options,
        app=f"{APP}:{'one' if replicas == 1 else 'two'}",
    )  # fmt: skip
    try:
        with running as run:
            recorder = _Recorder(run, "updates")
            pusher = _Pusher(run, 10)
            run.wait_for(lambda: len(recorder.delivered) > 20, 120.0, "the first results")
            time.sleep(warm_s)
            killed_us = now_us()
            run.processes[recorder.client.switches[-1][0]].kill()
            run.wait_for(
                lambda: recorder.delivered[-1].received_at_us > killed_us + 200_000, 120.0,
                "results after the kill",
            )  # fmt: skip
            time.sleep(seconds)
            pusher.stop()
            recorder.join(timeout=60)
            run.raise_failure()
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    return kill_cost(recorder.delivered, killed_us)


def kill_cost(delivered: list[Delivered], killed_us: int) -> dict[str, Any]:
    """The longest gap between two results around the kill, and results that arrived twice."""
    times = [one.received_at_us for one in delivered]
    gaps = [
        later - earlier
        for earlier, later in pairwise(times)
        if killed_us <= later and earlier <= killed_us + 1_000_000
    ]
    keys = [(one.bucket, key) for one in delivered for key in one.keys]
    return {
        "pause_after_kill_s": max(gaps) / 1e6,
        "duplicates_after_kill": len(keys) - len(set(keys)),
    }


def main() -> None:
    """Run one measurement in this process: its name and its arguments."""
    wanted = json.loads(sys.argv[1])
    measurements: dict[str, Any] = {
        "delays": measure_delays,
        "rate": lambda **options: {"rows_per_s": measure_rate(**options)},
        "kill": measure_kill,
    }
    print(json.dumps(measurements[wanted.pop("measure")](**wanted)), flush=True)


if __name__ == "__main__":
    main()
