"""Cost of replication (Flux section 5.4): throughput of the plain partitioned dataflow, of two
independent replicas of the dataflow (cluster pairs), and of pairs.

The same packets are pushed at once. Two times are measured: until the last result, and until both
replicas of every partition have processed the packets, because a client has its results as soon as
the faster replica is done. Each measurement uses a new deployment. The order of the three kinds is
reversed every second round, so that cluster pairs are always measured next to both others: the
speed of a machine varies. The result is the median of the ratios within a round.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import holdfast as hf
from holdfast.experiments import sessions, spread
from holdfast.experiments.sessions import BUCKET_MS, HOSTS, Packets
from holdfast.runtime.rolling_restart import position
from holdfast.runtime.running import Run

OPTIONS = replace(HOSTS, archive=False)
KINDS = ("plain", "clusters", "flux")
ROUNDS = 5
KEYS, ROWS = 100_000, 20_000
#: `WARM`: warm-up buckets pushed one by one, and pushed at once. Then `PUSHES` times, `BUCKETS`
#: buckets are pushed at once and their results awaited. One push takes only five or six steps and
#: varies by ± 8 %.
WARM, BUCKETS, PUSHES = (10, 20), 60, 2
LIMIT_S = 300.0


def run(say: Callable[[str], None]) -> dict[str, Any]:
    #: Rows per second until the last result, and until all replicas are done.
    until_result: dict[str, list[float]] = {kind: [] for kind in KINDS}
    until_done: dict[str, list[float]] = {kind: [] for kind in KINDS}
    replaced: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for number in range(ROUNDS):
        for kind in KINDS[:: -1 if number % 2 else 1]:
            result_s, done_s, count = _measure(kind)
            until_result[kind].append(PUSHES * BUCKETS * ROWS / result_s)
            until_done[kind].append(PUSHES * BUCKETS * ROWS / done_s)
            replaced[kind].append(count)
            say(f"round {number + 1}: {kind} {until_result[kind][-1]:,.0f} rows/s until the last "
                f"result, {until_done[kind][-1]:,.0f} until all replicas are done")  # fmt: skip
    return {
        "rows_per_s": {kind: [round(rate) for rate in of] for kind, of in until_result.items()},
        "rows_per_s_done": {kind: [round(rate) for rate in of] for kind, of in until_done.items()},
        "vs_cluster_pairs": _ratio(until_result, "clusters"),
        "vs_plain": _ratio(until_result, "plain"),
        "vs_cluster_pairs_done": _ratio(until_done, "clusters"),
        "vs_plain_done": _ratio(until_done, "plain"),
        "replaced": replaced,
    }


def _ratio(rates: dict[str, list[float]], other: str) -> float:
    """The median of the ratios of pairs to another kind, round by round."""
    ratios = [f / o for f, o in zip(rates["flux"], rates[other], strict=True)]
    return round(statistics.median(ratios), 3)


def _measure(kind: str) -> tuple[float, float, int]:
    """Return the seconds until the last result and until all replicas are done, and the number of
    replicas that were declared dead and replaced, although nothing failed."""
    network: hf.Network = getattr(sessions, kind)
    storage = tempfile.mkdtemp(prefix="holdfast-pairs-cost-")
    app = f"holdfast.experiments.sessions:{kind}"
    try:
        with Run(
            network, storage=storage, deployment="processes", options=OPTIONS, app=app
        ) as running:
            client, source = running.client("stats"), running.source("packets")
            threading.Thread(
                target=client.foreach_bucket, args=(lambda table, info: None,), daemon=True
            ).start()
            packets = Packets(KEYS, ROWS)

            def push(first: int, last: int) -> None:
                """Push these buckets and wait for all their results."""
                for bucket in range(first, last + 1):
                    source.push(packets.bucket(bucket))
                    source.advance((bucket + 1) * BUCKET_MS * 1_000)
                running.wait_for(
                    lambda: client.position is not None and client.position >= last, LIMIT_S,
                    f"results of {kind}",
                )  # fmt: skip

            one_by_one, at_once = WARM
            for bucket in range(1, one_by_one + 1):
                push(bucket, bucket)
            push(one_by_one + 1, one_by_one + at_once)
            first = one_by_one + at_once + 1
            before = _epochs(running)
            result_s = done_s = 0.0
            for number in range(PUSHES):
                began, last = time.monotonic(), first + (number + 1) * BUCKETS - 1
                push(first + number * BUCKETS, last)
                result_s += time.monotonic() - began
                running.wait_for(
                    partial(_all_done, running, last), LIMIT_S, f"all replicas of {kind}"
                )
                done_s += time.monotonic() - began
            after = _epochs(running)
            replaced = sum(after[node] != epoch for node, epoch in before.items())
            return result_s, done_s, replaced
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _all_done(running: Run, bucket: int) -> bool:
    positions = [position(node) for node in running.status()["nodes"]]
    return all(upto is not None and upto >= bucket for upto in positions)


def _epochs(running: Run) -> dict[str, int]:
    return {node["node"]: node["epoch"] for node in running.status()["nodes"]}


def text(result: dict[str, Any]) -> list[str]:
    names = {"plain": "one replica", "clusters": "cluster pairs", "flux": "pairs"}

    def rates(key: str) -> str:
        return ", ".join(f"{names[kind]} {spread(of)}" for kind, of in result[key].items())

    return [
        f"rows/s until the last result, median (range) of {ROUNDS}: {rates('rows_per_s')}",
        f"rows/s until all replicas are done: {rates('rows_per_s_done')}",
        f"pairs compared with cluster pairs: {result['vs_cluster_pairs']:.2f} until the last "
        f"result, {result['vs_cluster_pairs_done']:.2f} until all are done (paper: 0.90)",
        f"pairs compared with one replica: {result['vs_plain']:.2f} and "
        f"{result['vs_plain_done']:.2f} (paper: 0.44)",
        *(
            f"replicas declared dead without a failure in each round, {names[kind]}: {counts}"
            for kind, counts in result.get("replaced", {}).items()
            if any(counts)
        ),
    ]
