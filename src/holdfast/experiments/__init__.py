"""Experiments that repeat the measurements of the papers and check the promises of Holdfast.

Each experiment is a module with `run(quick, say) -> dict`, `table(result) -> rich.table.Table` and
`plot(result, folder) -> list[str]`.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import psutil
from rich.console import Console

from holdfast.clock import now_us
from holdfast.errors import InputError, SetupError
from holdfast.verify.checkers import write_json

EXPERIMENTS = {
    "switch": "the replica that a client reads fails (Borealis section 5)",
    "serialization": "delay against bucket width (Borealis Table 3)",
    "tentative": "tentative rows against the wait before they are produced (Borealis Figure 9)",
    "policies": "policies for new rows during a failure and its correction (Borealis Figure 10)",
    "reconcile": "duration of a correction (Borealis Figure 12, Table 2)",
    "chain": "a failure upstream of a chain of nodes (Borealis Figure 11)",
    "availability": "age of the newest result during a failure and its correction (section 3.4.3)",
    "overhead": "cost of protection without failures",
    "pairs": "a host is killed and replaced by a standby (Flux section 5.4)",
    "vs-structured-streaming": "the same queries on plain Structured Streaming",
    "vs-peers": "the windowed aggregate on Flink SQL, Bytewax and Pathway",
    "endurance": "memory and step time over thousands of buckets",
    "cec": "eventual checkpoints: cost and recovery time (CEC Figures 5 to 9)",
    "cec-kills": "eventual checkpoints: recovery of a node killed with SIGKILL",
    "growth": "step time, memory and bytes written over rows, keys, windows, joins and outputs",
}


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median and range as text."""
    median, low, high = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low} to {high})"


def run_experiment(name: str, *, quick: bool, json_to: str | None, plots: str | None) -> int:
    console = Console(stderr=json_to == "-")
    if name == "list":
        for key, text in EXPERIMENTS.items():
            print(f"{key:26} {text}")  # one line each, for scripts
        return 0
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name!r}; there are: {', '.join(EXPERIMENTS)}")
    module = importlib.import_module(f"holdfast.experiments.{name.replace('-', '_')}")
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim] {text}", highlight=False)

    psutil.cpu_percent()  # the next call gives the mean since this one
    result = module.run(quick, say)
    measured = {
        "command": f"holdfast experiment {name}{' --quick' if quick else ''}",
        "on": datetime.fromtimestamp(now_us() / 1e6, UTC).date().isoformat(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "cores": os.cpu_count(),
        "busy": round(psutil.cpu_percent() / 100, 2),
    }
    result = {"experiment": name, "quick": quick, "measured": measured, **result}
    if json_to is not None:
        write_json(result, json_to)
    console.print(module.table(result))
    if plots is not None:
        try:
            import matplotlib
        except ImportError:
            raise SetupError("--plots needs matplotlib: pip install 'holdfast[plots]'") from None
        matplotlib.use("Agg")
        os.makedirs(plots, exist_ok=True)
        for path in module.plot(result, plots):
            console.print(f"wrote plot {path}")
    return 0
