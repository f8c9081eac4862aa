"""A client whose replica fails: time to switch and gap (Borealis section 5: 40 ms to switch).

The network has three sources, one fragment on two node processes with their own Spark, and one
client. The replica that the client reads is killed with SIGKILL, killed with its storage deleted,
stopped with SIGSTOP, or cut off from all other processes, in turn. A killed process closes its
connections, so the client detects the failure at once. A stopped process and a cut link close
nothing: the client detects the failure when the other replica is three buckets ahead, or when no
heartbeat has arrived for `silence`. When the replica has caught up, the replica that is read at
that time fails, and so on. The gap is the longest time between two stable buckets at the client.
Its bound is two buckets and two steps, and `silence` where no connection is closed. Every row must
arrive exactly once.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

import holdfast as hf
from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo
from holdfast.edge.source import Source
from holdfast.errors import HoldfastError
from holdfast.experiments import spread
from holdfast.runtime.running import Run
from holdfast.streams.calls import GetStreamStatus, StreamStatus
from holdfast.types import OutputState, Stability
from holdfast.verify.chaos.proxy import Proxies

BUCKET_MS = 200
PAPER_SWITCH_MS = 40
PUSH_EVERY_S, PUSH_ROWS = 0.05, 10
#: Deadline for a node process to start its JVM and catch up, in seconds.
BACK_S = 90.0
#: Calm time before each failure, in seconds.
CALM_S = 4.0
#: How long a replica is stopped or cut off, in seconds.
HELD_S = 6.0
KILLED, DELETED, STOPPED, CUT_OFF = "killed", "killed, storage deleted", "stopped", "cut off"
FAILURES = (KILLED, STOPPED, DELETED, CUT_OFF)
#: Failures that close no connection.
SILENT = (STOPPED, CUT_OFF)
#: How often each failure occurs in the full form.
REPEATS = 4


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
        self._values: list[np.ndarray] = []
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
        self._values.append(table["value"].to_numpy())
        self.came.append(info.received_at_us)

    @property
    def values(self) -> np.ndarray:
        """The values of all stable rows, in order of arrival."""
        return np.concatenate(self._values)

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
    failures, storage = FAILURES * (1 if quick else REPEATS), tempfile.mkdtemp(prefix="holdfast-")
    options = hf.Options(memory="1g", master="local[1]", archive=False)
    proxies = Proxies()
    running = Run(
        net, storage=storage, deployment="processes", options=options,
        app="holdfast.experiments.switch:net",
    )  # fmt: skip
    running.route = lambda consumer, producer, address: (
        proxies.link(producer, consumer, address).address
    )
    try:
        with running:
            return _measure(running, proxies, failures, options, say)
    finally:
        proxies.close()
        shutil.rmtree(storage, ignore_errors=True)


def _measure(
    running: Run, proxies: Proxies, failures: Sequence[str], options: hf.Options,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    stop, pushed = threading.Event(), [n * 10**9 for n in range(3)]
    sources = list(running.sources.values())
    pushers = [
        threading.Thread(target=_push, args=(source, stop, number, pushed), daemon=True)
        for number, source in enumerate(sources)
    ]
    recorder = _Recorder(running)
    recorder.start()
    for pusher in pushers:
        pusher.start()
    rows: list[dict[str, Any]] = []
    silence_ms = 1_000 * options.silence_s

    def all_up() -> bool:
        return all(caught_up(running, "merged", name, BUCKET_MS) for name in running.processes)

    try:
        for failure in failures:
            running.wait_for(all_up, BACK_S, "all replicas to catch up")
            running.wait_for(
                lambda: recorder.reads is not None, BACK_S, "the client to read from a replica"
            )
            time.sleep(CALM_S)
            steps = [node["step_ms"] or 0.0 for node in running.status()["nodes"]]
            bound_ms = 2 * BUCKET_MS + 2 * max(steps) + (silence_ms if failure in SILENT else 0.0)
            rows.append(_fail(running, proxies, recorder, failure, bound_ms))
            say(f"{rows[-1]['replica']} {failure}: detected after {rows[-1]['detected_ms']} ms, "
                f"switched in {rows[-1]['switch_ms']} ms, gap {rows[-1]['gap_ms']} ms")  # fmt: skip
        running.wait_for(all_up, BACK_S, "all replicas to catch up")
    finally:
        stop.set()
    for pusher in pushers:
        pusher.join()
    for source in sources:
        source.end()
    recorder.join(timeout=BACK_S)
    running.raise_failure()
    wanted = np.concatenate([np.arange(n * 10**9, pushed[n]) for n in range(3)])
    distinct = np.unique(recorder.values)
    return {
        "bucket_ms": BUCKET_MS,
        "silence_ms": silence_ms,
        "failures": rows,
        "switch_ms_median": round(statistics.median(row["switch_ms"] for row in rows), 1),
        "switch_ms_paper": PAPER_SWITCH_MS,
        "within_bounds": all(row["gap_ms"] <= row["bound_ms"] for row in rows),
        "lossless": bool(np.isin(wanted, distinct).all()),
        "duplicates": len(recorder.values) - len(distinct),
        "wrong": len(np.setdiff1d(distinct, wanted)),
        "tentative_rows": recorder.tentative_rows,
        "rows": len(wanted),
    }


def _fail(
    running: Run, proxies: Proxies, recorder: _Recorder, failure: str, bound_ms: float
) -> dict[str, Any]:
    replica, before = str(recorder.reads), len(recorder.client.switches)
    process = running.processes[replica]

    def lose_storage() -> None:
        shutil.rmtree(process.folder, ignore_errors=True)

    links = [link for link in proxies.all() if replica in (link.producer, link.consumer)]
    at_us = now_us()
    match failure:
        case "stopped":
            process.pause()
        case "cut off":
            for link in links:
                link.cut()
        case _:
            process.kill(before_restart=lose_storage if failure == DELETED else None)

    def switched() -> list[tuple[str, int, int]]:
        """Switches to another replica than the failed one."""
        return [one for one in recorder.client.switches[before:] if one[0] != replica]

    try:
        running.wait_for(lambda: bool(switched()), 10.0, "the client to switch to another replica")
        _, first_us, switch_us = switched()[0]
        running.wait_for(
            lambda: recorder.came[-1] > first_us + 500_000, 10.0, "results after the switch"
        )
        if failure in SILENT:
            time.sleep(max(0.0, HELD_S - (now_us() - at_us) / 1e6))
    finally:
        if failure == STOPPED:
            process.resume()
        elif failure == CUT_OFF:
            for link in links:
                link.mend()
    return {
        "replica": replica,
        "failure": failure,
        "detected_ms": round((first_us - switch_us - at_us) / 1_000, 1),
        "switch_ms": round(switch_us / 1_000, 1),
        "gap_ms": round(recorder.gap_ms(at_us, first_us + 3_000_000), 1),
        "bound_ms": round(bound_ms, 1),
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="The replica that a client reads fails: median (range), in ms")
    for column in ("failure", "times", "detected after", "switched in", "longest gap", "bound"):
        shown.add_column(column, justify="left" if column == "failure" else "right")
    for failure in dict.fromkeys(row["failure"] for row in result["failures"]):
        rows = [row for row in result["failures"] if row["failure"] == failure]
        shown.add_row(
            failure, str(len(rows)),
            *(spread([row[key] for row in rows], 1) for key in ("detected_ms", "switch_ms")),
            f"{max(row['gap_ms'] for row in rows):,.0f}",
            f"{min(row['bound_ms'] for row in rows):,.0f}",
        )  # fmt: skip
    shown.caption = (
        f"Median switch {result['switch_ms_median']:.1f} ms (Borealis: {PAPER_SWITCH_MS} ms); "
        f"{result['rows']:,} rows, {'none' if result['lossless'] else 'SOME'} lost, "
        f"{result['duplicates']} duplicates, {result['tentative_rows']} tentative rows"
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    rows = result["failures"]
    names = list(dict.fromkeys(row["failure"] for row in rows))
    figure, axes = plt.subplots(figsize=(7, 4))
    for offset, (key, label) in enumerate(
        (("detected_ms", "detected"), ("switch_ms", "switched"), ("gap_ms", "gap between results"))
    ):
        points = [(names.index(row["failure"]) + 0.2 * (offset - 1), row[key]) for row in rows]
        axes.plot(*zip(*points, strict=True), "o", alpha=0.7, label=f"{label} (ms)")
    axes.axhline(PAPER_SWITCH_MS, linestyle="--", color="gray", label="switch, Borealis (2005)")
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    path = os.path.join(folder, "switch.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
