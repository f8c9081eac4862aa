"""Borealis Figure 11: a failure upstream of a chain of nodes, as seen by the client at its end.

The chain has one to four node processes, each with its own JVM. Three sources feed the first node,
and the connection to one of them is cut for 15 s. Every node may delay rows by `max_delay` (X in
Borealis). A node that processes the available rows (`process`) adds nothing to the delay of its
predecessors; a node that always waits (`delay`) adds its X. Corrections propagate down the chain: a
node corrects its results after its predecessor.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from rich.table import Table

import holdfast as hf
from holdfast.clock import now_us
from holdfast.experiments.failing import CUT, Breakable, Numbered, Seen, Watch, fail, joined
from holdfast.model.protection import CorrectionPolicy, FailurePolicy
from holdfast.runtime.running import Run
from holdfast.streams.delivery import Peer
from holdfast.verify.chaos.proxy import Proxies

X_S, FAILURE_S = 3.0, 15.0
BUCKET_MS = 500
RATE = 3_000
#: Rows of state of the join in each node.
STATE_ROWS = 50
#: Policy during a failure, policy during its correction.
POLICIES: dict[str, tuple[FailurePolicy, CorrectionPolicy]] = {
    "process+process": ("process", "process"),
    "delay+delay": ("delay", "delay"),
    "process+suspend": ("process", "suspend"),
}
DEPTHS = (1, 2, 3, 4)
#: Read off Figure 11 (top): the longest delay in seconds, by depth of the chain. The text gives the
#: two curves as X plus processing, and as X for each node.
PAPER_S = {
    "process+process": (3.0, 3.0, 3.0, 3.0),
    "delay+delay": (3.0, 6.0, 9.0, 12.0),
}
#: Warm-up in seconds. Several JVMs share two cores, so the first results are slow.
WARM_S = 25.0


def network(policy: str, depth: int) -> tuple[hf.Network, list[Numbered]]:
    on_failure, while_correcting = POLICIES[policy]
    net = hf.Network("chain", bucket=f"{BUCKET_MS}ms")
    generators = [Numbered(number, RATE // 3) for number in (1, 2, 3)]
    sources = [
        net.source(
            f"s{rows.source}", "ts timestamp, source int, n long", time="ts", feed=hf.Generate(rows)
        ).on("n1")
        for rows in generators
    ]
    stream = joined(net.union(*sources).filter("n >= 0"), RATE, STATE_ROWS)
    for number in range(2, depth + 1):
        stream = joined(stream.on(f"n{number}"), RATE, STATE_ROWS)
    net.output("merged", stream)
    for number in range(1, depth + 1):
        net.protect(
            f"n{number}",
            on_failure=on_failure,
            while_correcting=while_correcting,
            max_delay=f"{X_S:g}s",
        )
    return net, generators


def __getattr__(name: str) -> hf.Network:
    """Build the network that a node process imports by name, such as `process_process_3`."""
    policy, _, depth = name.rpartition("_")
    policy = policy.replace("_", "+")
    if policy not in POLICIES or not depth.isdigit():
        raise AttributeError(name)
    return network(policy, int(depth))[0]


class Chain(Breakable):
    """A chain of node processes. The link between source `CUT` and the first node can be cut."""

    def __init__(self, network: hf.Network, **how: Any) -> None:
        super().__init__(network, deployment="processes", **how)
        self._proxies = Proxies()
        self.route = lambda consumer, producer, address: (
            self._proxies.link(producer, consumer, address).address
        )

    def _ends(self) -> list[Any]:
        return [link for link in self._proxies.all() if link.producer == CUT]

    def cut(self, stream: str) -> None:
        for link in self._ends():
            link.cut(CUT)
            link.cut(link.consumer)

    def heal(self, stream: str) -> None:
        for link in self._ends():
            link.heal()
        self.back_at_us[stream] = now_us()

    def peer_of(self, stream: str, consumer: str, producer: str) -> Peer:
        return Run.peer_of(self, stream, consumer, producer)

    def stop(self) -> None:
        super().stop()
        self._proxies.close()


def measure(policy: str, depth: int, say: Callable[[str], None]) -> dict[str, Any]:
    net, generators = network(policy, depth)
    storage = tempfile.mkdtemp(prefix="holdfast-chain-")
    name = f"{policy.replace('+', '_')}_{depth}"
    run = Chain(
        net, storage=storage, app=f"holdfast.experiments.chain:{name}",
        options=hf.Options(archive=False, memory="512m", master="local[1]", silence="1s"),
    )  # fmt: skip
    try:
        with run, Watch(run.client("merged", tentative=True, durable=False)) as watch:
            watch.wait(lambda: watch.client.position is not None)
            threading.Event().wait(WARM_S)
            failure = fail(run, watch, FAILURE_S)
            seen = Seen(watch)
            steps = [node["step_ms"] or 0.0 for node in run.status()["nodes"]]
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    step_ms = max(steps)
    process_ms = 1_000 * X_S + depth * (BUCKET_MS + 2 * step_ms)
    bound_ms = 1_000 * X_S * depth if policy == "delay+delay" else process_ms
    row = {
        "policy": policy,
        "nodes": depth,
        "delay_new_ms_max": round(seen.delay_new_ms(failure.cut_at_us, failure.until_us), 1),
        "bound_ms": round(bound_ms, 1),
        "step_ms": step_ms,
        "tentative_rows": failure.tentative_rows,
        "stabilization_ms": round(failure.stabilization_ms, 1),
        "lossless": seen.lossless(generators, failure.cut_at_us - 2_000_000, failure.over_at_us),
        "delay_paper_ms": _paper_ms(policy, depth),
    }
    say(f"{policy}, {depth} nodes: delay of new rows {row['delay_new_ms_max']:.0f} ms (bound "
        f"{bound_ms:.0f}), {failure.tentative_rows} tentative rows")  # fmt: skip
    return row


def _paper_ms(policy: str, depth: int) -> float | None:
    return 1_000 * PAPER_S[policy][depth - 1] if policy in PAPER_S else None


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    depths = (1, 3) if quick else DEPTHS
    policies = ["process+process", "delay+delay"] if quick else list(POLICIES)
    rows = [measure(policy, depth, say) for policy in policies for depth in depths]
    bounded = [row for row in rows if row["policy"] != "process+suspend"]
    return {
        "x_s": X_S,
        "failure_s": FAILURE_S,
        "bucket_ms": BUCKET_MS,
        "runs": rows,
        "bounded": all(row["delay_new_ms_max"] <= row["bound_ms"] for row in bounded),
        "lossless": all(row["lossless"] for row in rows),
        "step_ms_median": statistics.median(row["step_ms"] for row in rows),
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(
        title=f"A failure of {result['failure_s']:g} s upstream of a chain, X = {result['x_s']:g} s"
    )
    columns = ("policy", "nodes", "delay new (ms)", "bound", "Borealis", "tentative rows",
               "corrected in (ms)", "lossless")  # fmt: skip
    for column in columns:
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for row in result["runs"]:
        paper = row["delay_paper_ms"]
        shown.add_row(
            row["policy"], str(row["nodes"]), f"{row['delay_new_ms_max']:,.0f}",
            f"{row['bound_ms']:,.0f}", "-" if paper is None else f"about {paper:,.0f}",
            f"{row['tentative_rows']:,}", f"{row['stabilization_ms']:,.0f}",
            "yes" if row["lossless"] else "NO",
        )  # fmt: skip
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 7), sharex=True)
    for policy in POLICIES:
        rows = [row for row in result["runs"] if row["policy"] == policy]
        if not rows:
            continue
        nodes = [row["nodes"] for row in rows]
        (line,) = top.plot(
            nodes, [row["delay_new_ms_max"] / 1_000 for row in rows], marker="o", label=policy
        )
        if policy in PAPER_S:
            top.plot(
                DEPTHS, PAPER_S[policy], linestyle="--", color=line.get_color(),
                label=f"{policy}, Borealis (text)",
            )  # fmt: skip
        bottom.plot(
            nodes, [row["tentative_rows"] / 1_000 for row in rows], marker="o",
            color=line.get_color(), label=policy,
        )  # fmt: skip
    top.set_ylabel("longest delay of new rows (s)")
    bottom.set_ylabel("tentative rows (thousands)")
    bottom.set_xlabel("nodes in the chain")
    bottom.set_xticks(DEPTHS)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.tight_layout()
    path = os.path.join(folder, "chain.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
