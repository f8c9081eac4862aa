"""The windowed aggregate on Holdfast, Flink SQL, Bytewax and Pathway.

All systems read the same Parquet files: windows of 1 s, buckets of 100 ms, count and sum per
source. Each run is a process of its own, and the systems take turns. For the rate, all files exist
before the start. For the delay, a file appears every 100 ms, with fewer rows, so that every system
keeps up. Each system is tuned as far as its guides go, and keeps what it needs to recover; how much
that is differs, and `DURABILITY` says it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.table import Table

from holdfast.errors import HoldfastError, SetupError
from holdfast.experiments.peer_environments import SCRIPTS, environment, flink_classpath
from holdfast.experiments.peer_results import (
    Marks,
    delays_ms,
    expected,
    problem,
    rows_per_s,
    summary,
    visible_at,
)
from holdfast.experiments.versus.workload import write_buckets

KEYS = 10_000
WIDTH_US = 100_000
RUN_S = 300

DURABILITY = {
    "holdfast": "results and their log record flushed to disk in every step, state every second",
    "flink": "checkpoints of state and position; results become visible with a checkpoint; files "
    "of results flushed to disk",
    "bytewax": "recovery store in SQLite, snapshot every second; results as they come, at least "
    "once, not flushed to disk",
    "pathway": "persistence of the input (in the Arrow form: of file names), snapshot every "
    "second; results as they come, at least once, not flushed to disk",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One configuration of one system."""

    system: str
    note: str
    options: dict[str, Any] = field(default_factory=dict)
    #: Row-by-row forms are slow: they get the small buckets.
    slow: bool = False
    delay: bool = False
    #: Measured in the first round only, because it takes long or serves as a reference.
    once: bool = False


PEERS = {
    "holdfast": Peer("holdfast", "one bucket per step", {"group": 1}, delay=True),
    "holdfast_10": Peer("holdfast", "ten buckets per step, as with a backlog", {"group": 10}),
    "flink": Peer("flink", "SQL, checkpoint every second", {"checkpoint_ms": 1_000}, delay=True),
    "flink_100ms": Peer("flink", "every 100 ms", {"checkpoint_ms": 100}, delay=True),
    "flink_10s": Peer("flink", "every 10 s", {"checkpoint_ms": 10_000}, delay=True),
    "flink_read": Peer(
        "flink", "reads only, no aggregate", {"checkpoint_ms": 1_000, "form": "read"}, once=True
    ),
    "bytewax": Peer("bytewax", "`fold_window` on rows", {"form": "rows"}, slow=True, once=True),
    "bytewax_arrow": Peer(
        "bytewax", "one item per row group, aggregated by Arrow", {"form": "arrow"}, delay=True
    ),
    "pathway": Peer("pathway", "`windowby` on rows", {"form": "rows"}, slow=True, once=True),
    "pathway_arrow": Peer(
        "pathway", "one item per row group, aggregated by Arrow", {"form": "arrow"}, delay=True
    ),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Buckets of one size, and the results they must give."""

    files: list[str]
    rows: int
    warm: int
    wanted: pa.Table

    @classmethod
    def write(cls, folder: Path, buckets: int, warm: int, rows: int) -> Inputs:
        files = write_buckets(folder, buckets, rows, KEYS)
        return cls(files, rows, warm, expected(files))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Pairs: number of buckets, and how many of them are the warm-up."""

    rounds: int
    large: tuple[int, int]
    small: tuple[int, int]
    #: The systems start while buckets arrive already; the warm-up includes the start.
    paced: tuple[int, int]
    paced_rounds: int
    #: Rows of a bucket: of the large ones, and of all others.
    rows: tuple[int, int] = (200_000, 20_000)


QUICK = Plan(3, large=(200, 120), small=(20, 10), paced=(400, 200), paced_rounds=1)
FULL = Plan(5, large=(400, 200), small=(40, 10), paced=(800, 300), paced_rounds=3)


class Wrong(HoldfastError):
    """The results of a system are not those of the query."""


@dataclass(slots=True)
class Runner:
    """Runs configurations in processes of their own."""

    folder: Path
    pythons: dict[str, str]
    classpath: str
    versions: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, inputs: Inputs, live: Path | None = None) -> Marks:
        """Run a configuration over all buckets, from a folder that may still be filled. Returns
        when they were done; for Flink with `live`, when their windows were visible."""
        peer = PEERS[name]
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="run-") as work:
            job = {
                "folder": str(live or Path(inputs.files[0]).parent), "work": work,
                "buckets": len(inputs.files), **peer.options,
            }  # fmt: skip
            if peer.system == "holdfast":
                job |= {"rows": inputs.rows, **({"group": 0} if live else {})}
                command = [sys.executable, "-m", "holdfast.experiments.holdfast_windows"]
            else:
                script = SCRIPTS / f"{peer.system}_peer.py"
                command = [self.pythons[peer.system], str(script)]
            if peer.system == "flink":
                job["classpath"] = self.classpath
            result = _result_of(name, [*command, json.dumps(job)])
            self.versions |= {
                library if library == peer.system else f"{library} of {peer.system}": version
                for library, version in result["versions"].items()
            }
            out = Path(work) / "out"
            if name != "flink_read":
                wrong = problem(out, inputs.wanted)
                if wrong is not None:
                    raise Wrong(f"{name}: {wrong}")
            if peer.system == "flink" and live is not None:
                return visible_at(out, result["files"])
            marks = result["done_at"] if live else result.get("read_at", result["done_at"])
            return [(count, at) for count, at in marks]

    def rate(self, name: str, inputs: Inputs) -> float:
        return rows_per_s(self.run(name, inputs), inputs.rows, inputs.warm)

    def delays(self, name: str, inputs: Inputs) -> list[float]:
        """A bucket appears every 100 ms, whether or not the system keeps up."""
        available_at: list[float] = []
        stop = threading.Event()
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="live-") as live:
            pacer = threading.Thread(
                target=_pace, args=(inputs.files, Path(live), available_at, stop)
            )
            pacer.start()
            try:
                marks = self.run(name, inputs, Path(live))
            finally:
                stop.set()
                pacer.join()
        return delays_ms(marks, available_at, inputs.warm)


def _pace(
    files: Sequence[str], live: Path, available_at: list[float], stop: threading.Event
) -> None:
    began = time.monotonic()
    for number, file in enumerate(files):
        if stop.wait(max(0.0, began + number * WIDTH_US / 1e6 - time.monotonic())):
            return
        os.link(file, live / Path(file).name)
        available_at.append(time.monotonic())


def _result_of(name: str, command: list[str]) -> dict[str, Any]:
    """The JSON line of a process. Its whole process group ends with it, also the JVM of Flink."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            text, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            raise HoldfastError(f"{name}: not done after {RUN_S} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        said = [
            line for line in errors.read().splitlines() if "Error" in line or "Exception" in line
        ]
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise HoldfastError(f"{name}: failed with {process.returncode}: {said[-1:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    return compare(QUICK if quick else FULL, say)


def compare(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    unavailable: dict[str, str] = {}
    pythons: dict[str, str] = {}
    rates: dict[str, list[float]] = {}
    delays: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as name:
        folder, classpath = Path(name), ""
        for system in ("flink", "bytewax", "pathway"):
            try:
                pythons[system] = environment(system, say)
                if system == "flink":
                    classpath = flink_classpath(pythons[system], folder)
            except SetupError as err:
                unavailable[system] = str(err)
                say(str(err))
        say("writing the input")
        many, few = plan.rows
        large = Inputs.write(folder / "large", *plan.large, many)
        small = Inputs.write(folder / "small", *plan.small, few)
        paced = Inputs.write(folder / "paced", *plan.paced, few)
        runner = Runner(folder, pythons, classpath)
        able = [key for key, peer in PEERS.items() if peer.system not in unavailable]

        def measure(key: str, of: Callable[[], str]) -> None:
            """A system that fails, or gives wrong results, is reported, and the others go on."""
            if key in unavailable:
                return
            try:
                say(f"{key}: {of()}")
            except HoldfastError as err:
                unavailable[key] = str(err)
                say(str(err))

        def rate_of(key: str) -> str:
            rate = runner.rate(key, small if PEERS[key].slow else large)
            rates.setdefault(key, []).append(rate)
            return f"{rate:,.0f} rows/s"

        def delay_of(key: str) -> str:
            found = runner.delays(key, paced)
            delays.setdefault(key, []).extend(found)
            return f"results after {sorted(found)[len(found) // 2]:,.0f} ms (median)"

        for number in range(plan.rounds):
            for key in able if number % 2 == 0 else reversed(able):
                if number and PEERS[key].once:
                    continue
                measure(key, lambda key=key: rate_of(key))  # type: ignore[misc]
        for _ in range(plan.paced_rounds):
            for key in able:
                if PEERS[key].delay:
                    measure(key, lambda key=key: delay_of(key))  # type: ignore[misc]
    return {
        **summary(rates, delays),
        "durability": DURABILITY,
        "versions": runner.versions,
        "unavailable": unavailable,
        "rows_a_bucket": {key: few if PEERS[key].slow else many for key in rates},
        "paced": {"rows_a_bucket": paced.rows, "bucket_ms": WIDTH_US // 1_000},
        "rounds": plan.rounds,
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="The windowed aggregate on Holdfast and its peers")
    shown.add_column("system", justify="left")
    shown.add_column("how", justify="left")
    for column in ("M rows/s", "from", "to", "delay ms", "p99 ms"):
        shown.add_column(column, justify="right")
    rates = result["rows_per_s"]
    for name in sorted(rates, key=lambda name: -rates[name]):
        low, high = result["spread"][name]
        delay = result["delay_ms"].get(name)
        shown.add_row(
            name, PEERS[name].note + (" (20,000 rows a bucket)" if PEERS[name].slow else ""),
            *(f"{value / 1e6:.3f}" for value in (rates[name], low, high)),
            *((f"{delay['median']:,.0f}", f"{delay['p99']:,.0f}") if delay else ("", "")),
        )  # fmt: skip
    lines = [f"{system}: {text}" for system, text in result["durability"].items()]
    lines += [f"versions: {', '.join(f'{k} {v}' for k, v in sorted(result['versions'].items()))}"]
    lines += [f"not measured: {text}" for text in result["unavailable"].values()]
    shown.caption = "\n".join(lines)
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    rates, delays = result["rows_per_s"], result["delay_ms"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    names = sorted(rates, key=lambda name: rates[name])
    colors = {"holdfast": "C0", "flink": "C1", "bytewax": "C2", "pathway": "C3"}
    values = [rates[name] / 1e6 for name in names]
    ranges = [[end / 1e6 for end in result["spread"][name]] for name in names]
    low = [value - ends[0] for value, ends in zip(values, ranges, strict=True)]
    high = [ends[1] - value for value, ends in zip(values, ranges, strict=True)]
    left.barh(names, values, xerr=[low, high], capsize=3,
              color=[colors[PEERS[name].system] for name in names])  # fmt: skip
    left.set_xscale("log")
    left.set_xlabel("million rows per second (median and range)")
    names = sorted(delays, key=lambda name: -delays[name]["median"])
    middle = [delays[name]["median"] for name in names]
    above = [delays[name]["p99"] - delays[name]["median"] for name in names]
    right.barh(names, middle, xerr=[[0.0] * len(names), above], capsize=3,
               color=[colors[PEERS[name].system] for name in names])  # fmt: skip
    right.set_xscale("log")
    right.set_xlabel("delay of a window in ms (median, p99)")
    figure.tight_layout()
    path = os.path.join(folder, "vs-peers.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
