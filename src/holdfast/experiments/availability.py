"""Age of the newest result during a failure and its correction (Borealis section 3.4.3),
when the answering replica is lost during the correction.

The network has three sources, a union, two or three replicas and one client that maintains a table.
Each replica is a process with its own Spark. One source is cut off from all replicas for a while.
When the source is back and the first replica corrects its results, the replica that the client
reads is killed, stopped with SIGSTOP or cut off from all processes; or the client is closed and
restarted from its durable position. All links pass TCP proxies, so that a cut link stays open.

The experiment measures what a user sees. The age is the time since the end of the newest bucket
with a result, at every instant. An undo is a result that was withdrawn without a replacement; every
bucket has rows, so an ideal run has no undo. At the end, the table must equal the table of an ideal
run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table

import holdfast as hf
from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo, Client
from holdfast.experiments.failing import CUT, Numbered
from holdfast.experiments.switch import caught_up, status_at
from holdfast.runtime.running import Run
from holdfast.types import OutputState, Stability
from holdfast.verify.chaos.proxy import Proxies

BUCKET_MS = 500
X_MS = 3_000
RATE = 300
#: How long a replica stays stopped or cut off, in seconds.
HELD_S = 8.0
#: Warm-up of the JVMs before the first failure, and calm time before each failure, in seconds.
WARM_S, CALM_S = 30.0, 5.0
#: Deadline for a node process to start its JVM and catch up, also after the longest failure.
BACK_S = 180.0
#: Deadline for a correction to begin, in seconds.
BEGIN_S = 30.0

KILLED, STOPPED, CUT_OFF, RESTARTED = "killed", "stopped", "cut off", "client restarted"


@dataclass(frozen=True, slots=True)
class Case:
    replicas: int
    failure_s: float
    #: Fault during the correction: of the answering replica, or a restart of the client.
    lost: str | None = None

    def __str__(self) -> str:
        text = f"{self.replicas} replicas, an input is missing for {self.failure_s:g} s"
        if self.lost is None:
            return text
        return (
            f"{text}, {self.lost if self.lost == RESTARTED else f'answering replica {self.lost}'}"
        )


#: The timeline of a failure begins this long before it.
BEFORE_US = 5_000_000
QUICK = (
    Case(2, 5, KILLED), Case(2, 5, STOPPED), Case(2, 5, CUT_OFF), Case(2, 5, RESTARTED),
    Case(3, 5, KILLED),
)  # fmt: skip
ALL = (None, KILLED, STOPPED, CUT_OFF, RESTARTED)
FULL = (
    *(Case(2, failure_s, lost) for failure_s in (5, 30) for lost in ALL), Case(2, 300, KILLED),
    *(Case(3, 5, lost) for lost in ALL), Case(3, 30, KILLED), Case(3, 300, KILLED),
)  # fmt: skip


def _network(replicas: int) -> tuple[hf.Network, list[Numbered]]:
    net = hf.Network("availability", bucket=f"{BUCKET_MS}ms")
    generators = [Numbered(number, RATE // 3) for number in (1, 2, 3)]
    taps = [
        net.source(
            f"s{rows.source}", "ts timestamp, source int, n long", time="ts", feed=hf.Generate(rows)
        )
        for rows in generators
    ]
    merged = net.union(*taps).filter("n >= 0")
    net.output("merged", merged)
    # State that a correction has to recompute.
    window = merged.map("ts", key="n % 100").window("2s", slide=f"{BUCKET_MS}ms")
    net.output("counts", window.group_by("key").agg(n=hf.count()))
    net.protect(
        "main",
        replicas=replicas,
        on_failure="process",
        while_correcting="process",
        max_delay=f"{X_MS}ms",
    )
    return net, generators


two, _made_by_two = _network(2)
three, _made_by_three = _network(3)
NETWORKS = {2: (two, "two", _made_by_two), 3: (three, "three", _made_by_three)}


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for replicas in (2, 3):
        cases = [case for case in (QUICK if quick else FULL) if case.replicas == replicas]
        runs += _measure(replicas, cases, say)
    return {"bucket_ms": BUCKET_MS, "x_ms": X_MS, "rows_per_s": RATE, "runs": runs}


def _measure(
    replicas: int, cases: Sequence[Case], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    network, name, generators = NETWORKS[replicas]
    folder = tempfile.mkdtemp(prefix="holdfast-availability-")
    proxies = Proxies()
    options = hf.Options(
        memory="1g", master="local[1]", java_options="-XX:TieredStopAtLevel=1", archive=False,
        by_reference=False,
    )  # fmt: skip
    running = Run(
        network, storage=os.path.join(folder, "storage"), deployment="processes", options=options,
        app=f"holdfast.experiments.availability:{name}",
    )  # fmt: skip
    running.route = lambda consumer, producer, address: (
        proxies.link(producer, consumer, address).address
    )
    try:
        with running:
            bench = _Bench(running, proxies, generators, os.path.join(folder, "table"), say)
            try:
                bench.warm_up()
                return [bench.measure(case) for case in cases]
            finally:
                bench.consumer.close()
    finally:
        proxies.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Application:
    """Application that maintains a table and records arrivals. Its client can be restarted."""

    def __init__(self, open_client: Callable[[], Client], table: hf.CorrectedTable) -> None:
        self._open_client, self._table = open_client, table
        #: Time at which a newer bucket became the newest result, and that bucket.
        self.newest: list[tuple[int, int]] = []
        #: Arrival times of tentative buckets, of replacements, and of replacements without rows.
        self.tentative: list[int] = []
        self.replaced: list[int] = []
        self.undos: list[int] = []
        #: All results: arrival time, bucket, and whether the result was tentative.
        self.arrivals: list[tuple[int, int, bool]] = []
        self.failure: BaseException | None = None
        self.start()

    def start(self) -> None:
        self.client = self._open_client()
        self._thread = threading.Thread(target=self._read, name="application", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.client.close()
        self._thread.join(timeout=10)

    @property
    def reads(self) -> str | None:
        return self.client.switches[-1][0] if self.client.switches else None

    def age_us(self, since_us: int, until_us: int) -> int:
        """Return the highest age of the newest result in this interval, since its bucket ended."""
        ages = [
            min(to, until_us) - (bucket + 1) * BUCKET_MS * 1_000
            for (at, bucket), (to, _) in pairwise([*self.newest, (until_us, 0)])
            if to > since_us and at < until_us
        ]
        return max(ages, default=0)

    def _read(self) -> None:
        try:
            self.client.foreach_bucket(self._take)
        except BaseException as err:
            self.failure = err

    def _take(self, table: pa.Table, info: BucketInfo) -> None:
        self._table(table, info)
        at = info.received_at_us
        if info.rec_done:
            return
        if info.replaces:
            self.replaced.append(at)
            if not info.rows:
                self.undos.append(at)
        is_tentative = info.stability is Stability.TENTATIVE
        if is_tentative:
            self.tentative.append(at)
        if info.rows:
            self.arrivals.append((at, info.bucket, is_tentative))
        if info.rows and (not self.newest or info.bucket > self.newest[-1][1]):
            self.newest.append((at, info.bucket))


class _Bench:
    def __init__(
        self, running: Run, proxies: Proxies, generators: list[Numbered], folder: str,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._run, self._proxies, self._made, self._say = running, proxies, generators, say
        self._table = hf.CorrectedTable(folder)
        self.consumer = _Application(
            lambda: running.client("merged", tentative=True, durable=True), self._table
        )

    def warm_up(self) -> None:
        self._all_up()
        time.sleep(WARM_S)

    def measure(self, case: Case) -> dict[str, Any]:
        self._say(str(case))
        self._all_up()
        time.sleep(CALM_S)
        steps = [node["step_ms"] or 0.0 for node in self._run.status()["nodes"]]
        began_us = now_us()
        names = tuple(self._run.processes)
        self._cut([(CUT, name) for name in names], case.failure_s)
        healed_us, lost_us, faulty = now_us(), None, None
        if case.lost is not None:
            self._wait(self._correcting, BEGIN_S, "a replica to begin its correction")
            lost_us = now_us()
            faulty = self._lose(case.lost)
        self._wait(lambda: self._corrected(healed_us), BACK_S, "the correction at the client")
        self._all_up()
        over_us = now_us()
        # The buckets of the last moments may arrive later.
        self._wait(lambda: self._has(over_us), BACK_S, "the results of the last moments")
        row = self._judge(case, began_us, over_us, max(steps), faulty)
        return row | self._timeline(began_us, healed_us, lost_us, over_us)

    # -- faults ---------------------------------------------------------------------------------

    def _cut(self, links: Sequence[tuple[str, str]], seconds: float) -> None:
        affected = [
            link for link in self._proxies.all()
            if any({link.producer, link.consumer} == set(ends) for ends in links)
        ]  # fmt: skip
        assert len(affected) >= len(links), (links, affected)
        for link in affected:
            link.cut()
        time.sleep(seconds)
        for link in affected:
            link.mend()

    def _lose(self, lost: str) -> str:
        if lost == RESTARTED:
            self.consumer.close()
            self.consumer.start()
            return self.consumer.client.name
        name = str(self.consumer.reads)
        process = self._run.processes[name]
        match lost:
            case "killed":
                process.kill()
            case "stopped":
                process.pause()
                time.sleep(HELD_S)
                process.resume()
            case _:
                ends = [(link.producer, link.consumer) for link in self._proxies.all()]
                self._cut([pair for pair in ends if name in pair], HELD_S)
        return name

    # -- waiting --------------------------------------------------------------------------------

    def _wait(self, test: Callable[[], bool], limit_s: float, what: str) -> None:
        def reached() -> bool:
            if self.consumer.failure is not None:
                raise self.consumer.failure
            return test()

        self._run.wait_for(reached, limit_s, what)

    def _all_up(self) -> None:
        def all_up() -> bool:
            return all(
                caught_up(self._run, "merged", name, BUCKET_MS) for name in self._run.processes
            )

        self._wait(all_up, BACK_S, "all replicas to catch up")
        self._wait(
            lambda: self.consumer.reads is not None, BACK_S, "the client to read from a replica"
        )

    def _correcting(self) -> bool:
        if self.consumer.replaced and self.consumer.replaced[-1] > now_us() - 1_000_000:
            return True
        return any(
            status_at(self._run, "merged", name).state is OutputState.STABILIZATION
            for name in self._run.processes
        )

    def _corrected(self, healed_us: int) -> bool:
        client = self.consumer.client
        if client.tentative_upto is not None or client.position is None:
            return False
        return client.position > healed_us // (BUCKET_MS * 1_000)

    def _has(self, until_us: int) -> bool:
        position = self.consumer.client.position
        return position is not None and (position + 1) * BUCKET_MS * 1_000 >= until_us

    def _timeline(
        self, began_us: int, healed_us: int, lost_us: int | None, over_us: int
    ) -> dict[str, Any]:
        """The failure over time, in seconds since its begin: for each result its arrival, the end
        of its bucket, and whether it was tentative."""

        def seconds(at_us: int) -> float:
            return round((at_us - began_us) / 1e6, 2)

        return {
            "healed_at_s": seconds(healed_us),
            "lost_at_s": None if lost_us is None else seconds(lost_us),
            "arrivals": [
                (seconds(at), seconds((bucket + 1) * BUCKET_MS * 1_000), tentative)
                for at, bucket, tentative in self.consumer.arrivals
                if began_us - BEFORE_US <= at <= over_us
            ],
        }

    # -- judging --------------------------------------------------------------------------------

    def _judge(
        self, case: Case, began_us: int, over_us: int, step_ms: float, faulty: str | None
    ) -> dict[str, Any]:
        bound_ms = X_MS + 2 * BUCKET_MS + 2 * step_ms
        if case.lost in (STOPPED, CUT_OFF):
            bound_ms += 1_000 * self._run.options.silence_s

        def between(times: Sequence[int]) -> int:
            return sum(began_us <= at <= over_us for at in times)

        undos = between(self.consumer.undos)
        table, ideal = self._rows(began_us, over_us), self._ideal(began_us, over_us)
        stable = table.filter(pc.equal(table["_stability"], Stability.STABLE.value))
        row = {
            "replicas": case.replicas,
            "failure_s": case.failure_s,
            "lost": case.lost,
            "who": faulty,
            "answering_replica_killed": case.lost == KILLED,
            "newest_standing_age_ms_max": round(self.consumer.age_us(began_us, over_us) / 1_000, 1),
            "bound_ms": round(bound_ms, 1),
            "step_ms": step_ms,
            "undos_per_failure": undos / (1 if case.lost is None else 2),
            "replacements": between(self.consumer.replaced),
            "tentative_buckets": between(self.consumer.tentative),
            "corrected_after_s": round((over_us - began_us) / 1e6 - case.failure_s, 1),
            "lossless": bool(np.isin(ideal, _keys(stable)).all()),
            "table_equals_ideal": np.array_equal(np.sort(_keys(table)), ideal),
        }
        self._say(
            f"  age of the newest result at most {row['newest_standing_age_ms_max']:.0f} ms (bound "
            f"{row['bound_ms']:.0f}), {row['replacements']} buckets were replaced, "
            f"{undos} withdrawn"
        )
        return row

    def _rows(self, since_us: int, until_us: int) -> pa.Table:
        """Return the rows of the table that were due during a failure."""
        table, (lo, hi) = self._table.read(), self._numbers(since_us, until_us)
        n = table["n"]
        return table.filter(pc.and_(pc.greater_equal(n, lo), pc.less(n, hi)))

    def _ideal(self, since_us: int, until_us: int) -> np.ndarray:
        n = np.arange(*self._numbers(since_us, until_us))
        return np.sort(np.concatenate([4 * n + rows.source for rows in self._made]))

    def _numbers(self, since_us: int, until_us: int) -> tuple[int, int]:
        """Return the range of row numbers due in this interval. All sources number alike."""
        return self._made[0].due(since_us), self._made[0].due(until_us)


def _keys(table: pa.Table) -> np.ndarray:
    """Encode each row as one number."""
    keys: np.ndarray = 4 * table["n"].to_numpy() + table["source"].to_numpy()
    return keys


def table(result: dict[str, Any]) -> Table:
    shown = Table(
        title="Age of the newest result while an input is missing and during the correction"
    )
    for column in ("replicas", "missing (s)", "lost during correction", "maximum age (ms)",
                   "after the return (ms)", "bound (ms)", "withdrawn", "replaced", "lossless",
                   "table = ideal"):  # fmt: skip
        shown.add_column(column, justify="right")
    for row in result["runs"]:
        shown.add_row(
            str(row["replicas"]), f"{row['failure_s']:g}", row["lost"] or "none",
            f"{row['newest_standing_age_ms_max']:.0f}", f"{1_000 * age_after_return_s(row):.0f}",
            f"{row['bound_ms']:.0f}",
            f"{row['undos_per_failure']:g}", str(row["replacements"]),
            *("yes" if row[key] else "NO" for key in ("lossless", "table_equals_ideal")),
        )  # fmt: skip
    shown.caption = (
        f"X {result['x_ms']} ms, buckets of {result['bucket_ms']} ms; the bound is X, two buckets "
        "and two steps, and `silence` where the replica that the client reads is stopped or cut off"
    )
    return shown


def age_after_return_s(row: dict[str, Any]) -> float:
    """Maximum age of the newest result after the missing input is back."""
    newest = np.maximum.accumulate([upto for _, upto, _ in row["arrivals"]])
    ages = [
        at - before
        for (at, _, _), before in zip(row["arrivals"][1:], newest, strict=False)
        if at > row["healed_at_s"]
    ]
    return float(max(ages))


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    rows = result["runs"]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(figsize=(1.2 + 0.7 * len(rows), 4.5))
    axes.bar(x, [row["newest_standing_age_ms_max"] / 1_000 for row in rows], 0.6, label="measured")
    axes.scatter(
        x, [row["bound_ms"] / 1_000 for row in rows], marker="_", s=400, color="C3", label="bound"
    )
    axes.set_xticks(
        x,
        [f"{r['replicas']} replicas\n{r['failure_s']:g} s\n{r['lost'] or 'none'}"
         for r in rows],
        rotation=60, fontsize=8,
    )  # fmt: skip
    axes.set_ylabel("age of the newest result (s)")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    path = os.path.join(folder, "availability.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path, _plot_timeline(_shown_run(rows), folder)]


def _shown_run(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The longest failure of at most 30 s in which the answering replica was killed."""
    killed = [row for row in rows if row["lost"] == KILLED and row["failure_s"] <= 30]
    return max(killed, key=lambda row: (row["failure_s"], -row["replicas"]))


def _plot_timeline(row: dict[str, Any], folder: str) -> str:
    """Draw one failure over time: which results arrive when."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    for tentative, color, label in ((False, "C0", "stable"), (True, "C1", "tentative")):
        points = [
            (at, upto) for at, upto, is_tentative in row["arrivals"] if is_tentative == tentative
        ]
        axes.plot(*zip(*points, strict=True), ".", color=color, label=f"{label} result")
    axes.axvspan(0, row["healed_at_s"], color="gray", alpha=0.15)
    axes.annotate("one of three inputs is missing", (row["healed_at_s"] / 2, 0.02),
                  xycoords=("data", "axes fraction"), ha="center", fontsize="small")  # fmt: skip
    axes.axvline(row["lost_at_s"], color="C3", linestyle="--")
    axes.annotate("the replica that  \nthe client reads  \nis killed  ",
                  (row["lost_at_s"], 0.12), ha="right",
                  xycoords=("data", "axes fraction"), fontsize="small", color="C3")  # fmt: skip
    last = row["arrivals"][-1][0]
    axes.plot(
        [-BEFORE_US / 1e6, last], [-BEFORE_US / 1e6, last], ":", color="gray", label="no delay"
    )
    axes.set_xlabel("arrival at the client (s since the input was cut off)")
    axes.set_ylabel("end of the bucket (s since the input was cut off)")
    axes.legend(loc="upper left", fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path = os.path.join(folder, "one-failure.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
