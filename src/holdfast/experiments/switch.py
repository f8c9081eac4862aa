"""A client whose replica is killed: time to switch and gap (Borealis section 5: 40 ms to switch).

The network has three sources, one fragment on two node processes with their own Spark, and one
client. The replica that the client reads is killed with SIGKILL, every second time with its
storage. When the killed replica has caught up, the replica that is read at that time is killed, and
so on. The gap is the longest time between two stable buckets at the client. Its bound is `silence`,
two buckets and two steps. Every row must arrive exactly once.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

import holdfast as hf
from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo
from holdfast.edge.source import Source
from holdfast.errors import HoldfastError
from holdfast.runtime.running import Run
from holdfast.streams.calls import GetStreamStatus, StreamStatus
from holdfast.types import OutputState, Stability

BUCKET_MS = 200
PAPER_SWITCH_MS = 40
PUSH_EVERY_S, PUSH_ROWS = 0.05, 10
#: Deadline for a node process to start its JVM and catch up, in seconds.
BACK_S = 90.0
#: Calm time before each kill, in seconds.
CALM_S = 4.0


def network() -> hf.Network:
    net = hf.Network("switch", bucket=f"{BUCKET_MS}ms")
    # Rows are pushed as soon as they are stamped. A row whose bucket ends in between is restamped.
    taps = [
        net.source(f"tap{i}", "ts timestamp, value long", time="ts", grace="0s", late="restamp")
        for i in (1, 2, 3)
    ]
    net.output("merged", net.union(*taps).filter("value >= 0"), contract=hf.Contract(within="5s"))
    net.protect("main", replicas=2, on_failure="process", while_correcting="process")
    return net


net = network()


class _Recorder(threading.Thread):
    """Application that records the arrival of results."""

    def __init__(self, run: Run) -> None:
        super().__init__(name="recorder", daemon=True)
        self.client = run.client("merged", tentative=True)
        self.values: Counter[int] = Counter()
        #: Arrival time of each stable bucket, in microseconds.
        self.came: list[int] = []
        self.tentative_rows = 0

    def run(self) -> None:
        self.client.foreach_bucket(self._take)

    def _take(self, table: Any, info: BucketInfo) -> None:
        if info.rec_done:
            return
        if info.stability is Stability.TENTATIVE:
            self.tentative_rows += table.num_rows
            return
        self.values.update(table.column("value").to_pylist())
        self.came.append(info.received_at_us)

    @property
    def reads(self) -> str | None:
        return self.client.switches[-1][0] if self.client.switches else None

    def gap_ms(self, since_us: int, until_us: int) -> float:
        arrivals = [at for at in self.came if since_us - 1_000_000 <= at <= until_us]
        return max((b - a for a, b in pairwise(arrivals)), default=0) / 1_000


def _push(source: Source, stop: threading.Event, number: int, pushed: list[int]) -> None:
    value = number * 10**9
    while not stop.wait(PUSH_EVERY_S):
        source.push(
            {"ts": np.full(PUSH_ROWS, now_us()), "value": np.arange(value, value + PUSH_ROWS)}
        )
        value += PUSH_ROWS
        pushed[number] = value


def status_at(run: Run, output: str, name: str) -> StreamStatus:
    """Return the status of an output at a replica; empty if the replica does not answer."""
    try:
        peer = run.peer_of(output, "watch", name)
        status = peer.call(GetStreamStatus(output))
        peer.close()
    except HoldfastError:
        return StreamStatus()
    return status


def caught_up(run: Run, output: str, name: str, bucket_ms: int) -> bool:
    """Whether the replica is stable and less than 2 s behind."""
    status = status_at(run, output, name)
    now = now_us() // (bucket_ms * 1_000)
    if status.state is not OutputState.STABLE or status.upto is None:
        return False
    return now - status.upto < 2_000 // bucket_ms


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    kills, storage = 2 if quick else 8, tempfile.mkdtemp(prefix="holdfast-switch-")
    options = hf.Options(memory="1g", master="local[1]", archive=False)
    try:
        with Run(
            net, storage=storage, deployment="processes", options=options,
            app="holdfast.experiments.switch:net",
        ) as running:  # fmt: skip
            return _measure(running, kills, options, say)
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _measure(
    running: Run, kills: int, options: hf.Options, say: Callable[[str], None]
) -> dict[str, Any]:
    stop, pushed = threading.Event(), [n * 10**9 for n in range(3)]
    sources = list(running.sources.values())
    pushers = [
        threading.Thread(target=_push, args=(source, stop, number, pushed), daemon=True)
        for number, source in enumerate(sources)
    ]
    consumer = _Recorder(running)
    consumer.start()
    for pusher in pushers:
        pusher.start()
    rows: list[dict[str, Any]] = []

    def all_up() -> bool:
        return all(caught_up(running, "merged", name, BUCKET_MS) for name in running.processes)

    try:
        for number in range(kills):
            running.wait_for(all_up, BACK_S, "all replicas to catch up")
            running.wait_for(
                lambda: consumer.reads is not None, BACK_S, "the client to read from a replica"
            )
            time.sleep(CALM_S)
            rows.append(_kill(running, consumer, wipe=number % 2 == 1))
            say(f"killed {rows[-1]['killed']}{' with its storage' if rows[-1]['wiped'] else ''}: "
                f"switched in {rows[-1]['switch_ms']} ms, gap {rows[-1]['gap_ms']} ms")  # fmt: skip
        running.wait_for(all_up, BACK_S, "all replicas to catch up")
        steps = [
            node["step_ms"] for node in running.status()["nodes"] if node.get("step_ms") is not None
        ]
    finally:
        stop.set()
    for pusher in pushers:
        pusher.join()
    for source in sources:
        source.end()
    consumer.join(timeout=BACK_S)
    running.raise_failure()
    wanted = {v for n in range(3) for v in range(n * 10**9, pushed[n])}
    step_ms = max(steps, default=0.0)
    bound_ms = 1_000 * options.silence_s + 2 * BUCKET_MS + 2 * step_ms
    gaps = [row["gap_ms"] for row in rows]
    return {
        "bucket_ms": BUCKET_MS,
        "kills": rows,
        "switch_ms_median": statistics.median(row["switch_ms"] for row in rows),
        "switch_ms_paper": PAPER_SWITCH_MS,
        "client_gap_ms_max": max(gaps),
        "bound_ms": round(bound_ms, 1),
        "step_ms": step_ms,
        "lossless": not wanted - set(consumer.values),
        "duplicates": sum(consumer.values.values()) - len(consumer.values),
        "wrong": len(set(consumer.values) - wanted),
        "tentative_rows": consumer.tentative_rows,
        "rows": len(wanted),
    }


def _kill(running: Run, consumer: _Recorder, *, wipe: bool) -> dict[str, Any]:
    killed, before = str(consumer.reads), len(consumer.client.switches)
    process = running.processes[killed]

    def lose_storage() -> None:
        shutil.rmtree(process.folder, ignore_errors=True)

    at_us = now_us()
    process.kill(before_restart=lose_storage if wipe else None)

    def switched() -> list[tuple[str, int, int]]:
        """Switches to another replica than the killed one."""
        return [one for one in consumer.client.switches[before:] if one[0] != killed]

    running.wait_for(lambda: bool(switched()), 10.0, "the client to switch to another replica")
    _, first_us, switch_us = switched()[0]
    running.wait_for(
        lambda: consumer.came[-1] > first_us + 500_000, 10.0, "results after the switch"
    )
    return {
        "killed": killed,
        "wiped": wipe,
        "detected_ms": round((first_us - switch_us - at_us) / 1_000, 1),
        "switch_ms": round(switch_us / 1_000, 1),
        "gap_ms": round(consumer.gap_ms(at_us, first_us + 3_000_000), 1),
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Killing the replica that a client reads")
    for column in ("killed", "storage", "detected after (ms)", "switched in (ms)", "gap (ms)"):
        shown.add_column(column, justify="right")
    for row in result["kills"]:
        shown.add_row(
            row["killed"], "deleted" if row["wiped"] else "retained", str(row["detected_ms"]),
            str(row["switch_ms"]), str(row["gap_ms"]),
        )  # fmt: skip
    shown.caption = (
        f"median switch {result['switch_ms_median']:.1f} ms (Borealis: {PAPER_SWITCH_MS} ms), "
        f"longest gap {result['client_gap_ms_max']:.0f} of {result['bound_ms']:.0f} ms allowed, "
        f"{result['rows']} rows, lossless {result['lossless']}, "
        f"{result['duplicates']} duplicates"
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    rows = result["kills"]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.bar(x - 0.2, [row["switch_ms"] for row in rows], 0.4, label="switch (ms)")
    axes.bar(x + 0.2, [row["gap_ms"] for row in rows], 0.4, label="gap between stable buckets (ms)")
    axes.axhline(PAPER_SWITCH_MS, linestyle="--", label="switch, Borealis (2005)")
    axes.set_xticks(x, [row["killed"] + ("\nwiped" if row["wiped"] else "") for row in rows])
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    path = os.path.join(folder, "switch.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
