"""A host is lost, and a standby replaces it (Flux section 5.4 and Figure 8).

The network computes sessions and their statistics, in four partitions each. The partitions run in
pairs on four hosts by chained declustering; ingress and egress run on a separate host, and one more
host is a standby. Each host is a process with its own Spark, fed in real time. First, a host is
killed with SIGKILL and loses its storage. Then a second host is killed, then a third one whose
standby is killed while it catches up. Finally all hosts are restarted one after the other. In a run
of its own, a host is stopped with SIGSTOP, and another host is cut off from all others and from the
controller, until a standby has replaced it: these failures close no connection and are detected by
missing heartbeats. All results of the client are audited.

A gap is the time between two results at the client. The bound is `silence`, two buckets and two
steps. While state is moved, the bound also includes the time of the move.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

import holdfast as hf
from holdfast.clock import monotonic_us, now_us
from holdfast.edge.client import BucketInfo
from holdfast.engine import session
from holdfast.errors import SetupError
from holdfast.experiments import pairs_cost
from holdfast.experiments.host_links import HostLinks
from holdfast.experiments.sessions import BUCKET_MS, HOSTS, Packets, flux
from holdfast.model.fragments import pairs_of
from holdfast.model.layout import EDGE
from holdfast.runtime.rolling_restart import position
from holdfast.runtime.run_status import node_status
from holdfast.runtime.running import Run
from holdfast.verify.audit import audit

OPTIONS = replace(HOSTS, standby=1)
#: The paper: 8.5 MB of state, moved in 941 ms.
PAPER_MOVED_BYTES, PAPER_MOVE_MS = 8_500_000, 941
#: The run is steady when the last `STEADY_BUCKETS` results arrived within this delay.
STEADY_BUCKETS, SOON_MS, QUICK_SOON_MS = 5, 1_500, 3_000
#: The experiment continues after this time even if the run is not steady, in seconds.
WARM_S = 120.0
#: The plot shows rows per second as means over this many buckets.
RATE_BUCKETS = 3
#: Deadline for a killed host to be replaced and to catch up, in seconds.
BACK_S = 150.0
WIPED, KILLED, WITH_STANDBY = "killed, storage deleted", "killed", "killed, then its standby"
STOPPED, CUT_OFF = "stopped", "cut off"
#: Failures of hosts that close their connections, and failures that do not.
KILLS = (("host-2", WIPED), ("host-3", KILLED), ("host-4", WITH_STANDBY))
SILENT = (("host-2", STOPPED), ("host-3", CUT_OFF))


Failures = Sequence[tuple[str, str]]


class _Load(threading.Thread):
    """Pushes the packets of a bucket when the bucket ends."""

    def __init__(self, run: Run, keys: int, rows: int) -> None:
        super().__init__(name="load", daemon=True)
        self._source, self._packets = run.source("packets"), Packets(keys, rows)
        self._over = threading.Event()
        self.rows = 0

    def run(self) -> None:
        width_us = BUCKET_MS * 1_000
        bucket = now_us() // width_us
        while not self._over.wait(max(0.0, ((bucket + 1) * width_us - now_us()) / 1e6)):
            rows = self._packets.bucket(bucket)
            self._source.push(rows)
            self._source.advance((bucket + 1) * width_us)
            self.rows += len(rows["ts"])
            bucket += 1
        self._source.end()

    def end(self) -> None:
        self._over.set()
        self.join()


class _Recorder(threading.Thread):
    """Application that records the arrival of results."""

    def __init__(self, run: Run) -> None:
        super().__init__(name="recorder", daemon=True)
        self.client = run.client("stats")
        #: Arrival time (us), number of rows, and delay since the end of the bucket (ms).
        self.came: list[tuple[int, int, float]] = []

    def run(self) -> None:
        self.client.foreach_bucket(self._take)

    def _take(self, table: Any, info: BucketInfo) -> None:
        self.came.append((info.received_at_us, info.rows, info.delay_us / 1_000))

    def gap_ms(self, since_us: int, until_us: int) -> float:
        """Return the longest time between two results that overlaps this interval."""
        times = [at for at, _, _ in self.came]
        gaps = [b - a for a, b in pairwise(times) if b >= since_us and a <= until_us]
        return round(max(gaps, default=0) / 1_000, 1)

    def is_steady(self, soon_ms: float) -> bool:
        last = [delay for _, _, delay in self.came[-STEADY_BUCKETS:]]
        return len(last) == STEADY_BUCKETS and max(last) < soon_ms


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    runs = []
    kills = KILLS[:2] if quick else KILLS
    stories = [(10_000, 4_000, kills), (10_000, 4_000, SILENT), (100_000, 10_000, kills)]
    for keys, rows, failures in stories[:2] if quick else stories:
        say(f"{keys:,} endpoint pairs, {1_000 * rows // BUCKET_MS:,} packets per second")
        runs.append(
            {"keys": keys, "rows_per_bucket": rows, **_losing(keys, rows, failures, quick, say)}
        )
    first = runs[0]
    result = {
        "bucket_ms": BUCKET_MS,
        **{
            name: all(measured[name] for measured in runs)
            for name in ("lossless", "second_loss_lossless")
        },
        "duplicates": sum(measured["duplicates"] for measured in runs),
        **{
            name: max(measured["losses"][0][name] for measured in runs)
            for name in ("takeover_gap_ms", "move_gap_ms", "takeover_ms", "catchup_ms")
        },
        "state_moved_bytes": first["losses"][0]["state_moved_bytes"],
        "within_bounds": all(measured["within_bounds"] for measured in runs),
        "runs": runs,
    }
    return result if quick else result | pairs_cost.run(say)


def _losing(
    keys: int, rows: int, failures: Failures, quick: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    storage = tempfile.mkdtemp(prefix="holdfast-pairs-")
    app = "holdfast.experiments.sessions:flux"
    running = Run(flux, storage=storage, deployment="processes", options=OPTIONS, app=app)
    # Proxies cost time, so only runs that cut links have them.
    links = HostLinks(running) if any(how == CUT_OFF for _, how in failures) else None
    try:
        with running:
            say("all hosts are running")
            measured = _Story(running, links, keys, rows, quick, say).measure(failures)
        say("auditing the results")
        sessions = session.start(hf.Options(memory="1g"))
        report = audit(flux, storage, sessions.large)
        comparison = report.outputs[0].found
        if not report.ok or comparison is None:
            say(report.text())
        lossless = comparison is not None and comparison.missing == comparison.wrong == 0
        return measured | {
            "lossless": lossless,
            "second_loss_lossless": lossless,
            "duplicates": -1 if comparison is None else comparison.duplicated,
            "result_rows": 0 if comparison is None else comparison.received_rows,
        }
    finally:
        if links is not None:
            links.close()
        shutil.rmtree(storage, ignore_errors=True)


class _Story:
    """The sequence of faults of one run, and the measurements at its client."""

    def __init__(
        self, run: Run, links: HostLinks | None, keys: int, rows: int, quick: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._run, self._links, self._say = run, links, say
        self._peers = pairs_of(run.network)
        self._consumer, self._load = _Recorder(run), _Load(run, keys, rows)
        self._soon_ms = QUICK_SOON_MS if quick else SOON_MS
        self._quick = quick

    def measure(self, failures: Failures) -> dict[str, Any]:
        began_us = now_us()
        self._consumer.start()
        self._load.start()
        losses: list[dict[str, Any]] = []
        rolled: dict[str, Any] | None = None
        try:
            for host, how in failures:
                self._steady()
                losses.append(self._lose(host, how))
            if failures == KILLS:
                self._steady()
                rolled = self._roll()
        finally:
            self._load.end()
        self._consumer.join(timeout=BACK_S)
        self._run.raise_failure()
        rows = [*losses, *([rolled] if rolled else [])]
        return {
            "losses": losses,
            "rolling": rolled,
            "within_bounds": all(
                row["takeover_gap_ms"] <= row["bound_ms"]
                and row["move_gap_ms"] <= row["bound_ms"] + row["move_ms"]
                for row in rows
            ),
            "rows": self._load.rows,
            "series": [
                [round((at - began_us) / 1e6, 2), rows, round(delay, 1)]
                for at, rows, delay in self._consumer.came
            ],
            "lost_at_s": [round((row["at_us"] - began_us) / 1e6, 2) for row in rows],
        }

    def _steady(self) -> None:
        with suppress(SetupError):  # not steady on a busy machine
            steady = partial(self._consumer.is_steady, self._soon_ms)
            self._run.wait_for(steady, WARM_S, "results with a short delay")
        self._run.wait_for(self._all_speak, BACK_S, "heartbeats of all hosts")

    def _all_speak(self) -> bool:
        """Whether every host has sent a heartbeat recently."""
        return all(self._run.controller.speaks(host, monotonic_us()) for host in self._run.layout)

    def _lose(self, host: str, how: str) -> dict[str, Any]:
        run, controller = self._run, self._run.controller
        names, process = controller.assigned(host), run.processes[host]
        before = {node["node"]: node for node in run.status()["nodes"]}
        epochs = {name: controller.epoch(name) for name in names}
        at_us = now_us()
        match how:
            case "stopped":
                process.pause()
            case "cut off":
                assert self._links is not None
                self._links.cut(host)
            case _:
                delete = (lambda: shutil.rmtree(process.folder)) if how == WIPED else None
                process.kill(before_restart=delete)

        def new_hosts() -> list[str]:
            return [
                h for h in run.layout if h != host and set(names) <= set(controller.assigned(h))
            ]

        run.wait_for(lambda: bool(new_hosts()), BACK_S, "a standby to take over")
        if how == WITH_STANDBY:
            time.sleep(0.3)  # the standby has begun to catch up
            run.processes[new_hosts()[0]].kill()
        run.wait_for(
            lambda: all(controller.epoch(name) > epochs[name] for name in names), BACK_S,
            "the new instances of the nodes",
        )  # fmt: skip
        run.wait_for(lambda: self._caught_up(names), BACK_S, "the new nodes to catch up")
        loss = self._judged(host, how, at_us, names, before)
        if how == STOPPED:
            process.resume()
        elif self._links is not None:
            self._links.mend()
        return loss

    def _judged(
        self, host: str, how: str, at_us: int, names: list[str], before: dict[str, Any]
    ) -> dict[str, Any]:
        caught_us = now_us()
        after = {node["node"]: node for node in self._run.status()["nodes"]}
        moved = [after[name]["moved"] for name in names if after[name].get("moved")]
        switched = [
            node["switch_ms"]
            for name, node in after.items()
            if name not in names and node.get("switches", 0) > before[name].get("switches", 0)
        ]
        moving_us = min((int(m["at_us"] - 1_000 * m["ms"]) for m in moved), default=at_us)
        # Wait until the client has received a result after the catch-up.
        self._run.wait_for(lambda: self._consumer.came[-1][0] > caught_us, BACK_S, "new results")
        bound_ms = _bound_ms(before.values())
        row = {
            "host": host, "how": how, "nodes": names, "at_us": at_us,
            "takeover_ms": max(switched, default=0.0),
            "takeover_gap_ms": self._consumer.gap_ms(at_us, moving_us),
            "move_gap_ms": self._consumer.gap_ms(moving_us, caught_us),
            "move_ms": max((m["ms"] for m in moved), default=0.0),
            "state_moved_bytes": sum(m["bytes"] for m in moved),
            "catchup_ms": round((caught_us - at_us) / 1_000, 1),
            "bound_ms": bound_ms,
        }  # fmt: skip
        self._say(
            f"{host} {how}: take-over {row['takeover_ms']:.0f} ms, gap "
            f"{row['takeover_gap_ms']:.0f} ms, {row['state_moved_bytes'] / 1e6:.2f} MB moved "
            f"in {row['move_ms']:.0f} ms, gap {row['move_gap_ms']:.0f} ms (bound "
            f"{bound_ms:.0f}), caught up after {row['catchup_ms']:.0f} ms"
        )
        return row

    def _roll(self) -> dict[str, Any]:
        at_us = now_us()
        bound_ms = _bound_ms(self._run.status()["nodes"])
        # Ingress and egress are not replicated, so a restart of their host would be visible.
        hosts = [host for host in self._run.layout if host != EDGE]
        self._run.rolling.hosts(self._say, hosts)
        done_us = now_us()
        self._run.wait_for(lambda: self._consumer.came[-1][0] > done_us, BACK_S, "new results")
        gap = self._consumer.gap_ms(at_us, done_us)
        self._say(f"all hosts restarted, longest gap {gap:.0f} ms (bound {bound_ms:.0f})")
        return {
            "hosts": hosts, "at_us": at_us, "seconds": round((done_us - at_us) / 1e6, 1),
            "takeover_gap_ms": gap, "move_gap_ms": gap, "move_ms": 0.0, "bound_ms": bound_ms,
        }  # fmt: skip

    def _caught_up(self, names: list[str]) -> bool:
        """Whether the nodes are at most one bucket behind their peers."""
        for name in names:
            own, other = (position(node_status(self._run, n)) for n in (name, self._peers[name]))
            if own is None or other is None or own < other - 1:
                return False
        return True


def _bound_ms(nodes: Iterable[dict[str, Any]]) -> float:
    step_ms: float = max(node["step_ms"] for node in nodes if node.get("step_ms"))
    return round(1_000 * OPTIONS.silence_s + 2 * BUCKET_MS + 2 * step_ms, 1)


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="A host fails (Flux section 5.4)")
    for column in ("endpoint pairs", "failure", "take-over (ms)", "gap (ms)", "state (MB)",
                   "transferred in (ms)", "gap meanwhile (ms)", "bound (ms)",
                   "caught up (s)"):  # fmt: skip
        shown.add_column(column, justify="right")
    for measured in result["runs"]:
        for loss in measured["losses"]:
            shown.add_row(
                f"{measured['keys']:,}", f"{loss['host']} {loss['how']}",
                f"{loss['takeover_ms']:.0f}", f"{loss['takeover_gap_ms']:.0f}",
                f"{loss['state_moved_bytes'] / 1e6:.2f}", f"{loss['move_ms']:.0f}",
                f"{loss['move_gap_ms']:.0f}", f"{loss['bound_ms']:.0f}",
                f"{loss['catchup_ms'] / 1_000:.1f}",
            )  # fmt: skip
    lines = [
        f"no row lost: {'yes' if result['lossless'] else 'NO'}, {result['duplicates']} duplicates, "
        f"all gaps within their bounds: {'yes' if result['within_bounds'] else 'NO'}",
        f"the paper transferred {PAPER_MOVED_BYTES / 1e6} MB in {PAPER_MOVE_MS} ms",
    ]
    for measured in result["runs"]:
        if rolled := measured["rolling"]:
            lines.append(
                f"{measured['keys']:,} endpoint pairs: all hosts restarted in {rolled['seconds']} "
                f"s, longest gap {rolled['takeover_gap_ms']:.0f} of {rolled['bound_ms']:.0f} ms"
            )
    if "vs_plain" in result:
        lines += pairs_cost.text(result)
        capacity = statistics.median(result["rows_per_s_done"]["flux"])
        loads = sorted({1_000 * run["rows_per_bucket"] // BUCKET_MS for run in result["runs"]})
        lines.append(
            "load as a share of the capacity of pairs: "
            + ", ".join(f"{load:,} packets/s {load / capacity:.0%}" for load in loads)
        )
    shown.caption = "\n".join(lines)
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    paths = []
    for measured in result["runs"]:
        figure, panels = plt.subplots(2, 1, figsize=(10, 6), sharex=True)
        at, rows = (np.array([row[column] for row in measured["series"]]) for column in (0, 1))
        # Two results can arrive at once, so the rate is averaged over a few buckets.
        over_s = RATE_BUCKETS * BUCKET_MS / 1_000
        counts, edges = np.histogram(at, np.arange(at[0], at[-1] + over_s, over_s), weights=rows)
        panels[0].stairs(counts / over_s / 1_000, edges)
        panels[0].set_ylabel("results (thousand rows/s)")
        panels[1].plot(at, [row[2] / 1_000 for row in measured["series"]], ".-")
        panels[1].set_ylabel("delay of results (s)")
        panels[1].set_xlabel("time (s)")
        labels = [f"{loss['host']} {loss['how']}" for loss in measured["losses"]]
        labels.append("all restarted, one by one")
        for axes in panels:
            for when, label in zip(measured["lost_at_s"], labels, strict=False):
                axes.axvline(when, color="C3", linestyle="--")
                axes.annotate(label, (when, 1), xycoords=("data", "axes fraction"), rotation=90,
                              ha="right", va="top", fontsize="small", color="C3")  # fmt: skip
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        figure.suptitle(f"Hosts fail, {measured['keys']:,} endpoint pairs (Flux Figure 8)")
        figure.tight_layout()
        silent = any(loss["how"] == CUT_OFF for loss in measured["losses"])
        name = f"pairs-{measured['keys']}{'-silent' if silent else ''}.png"
        paths.append(os.path.join(folder, name))
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths
