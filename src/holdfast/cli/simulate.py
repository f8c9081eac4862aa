"""`holdfast simulate`: runs seeds in virtual time, and shrinks a failing scenario."""

from __future__ import annotations

import gc
import logging
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import track

from holdfast.errors import InputError
from holdfast.verify.chaos import find
from holdfast.verify.checkers import Verdict, verdict_table, write_json
from holdfast.verify.scenario import Scenario
from holdfast.verify.sim.random_scenarios import scenario_of
from holdfast.verify.sim.simulation import Outcome, shrink, simulate
from holdfast.verify.sim.world import EPOCH_US

#: Lines of the transcript that are shown; the events before the failure are at its end.
LINES = 40


def run_simulate(
    *,
    seed: int | None = None,
    seeds: str | None = None,
    scenario: str | None = None,
    only: str | None = None,
    json_to: str | None = None,
    history_to: str | None = None,
) -> int:
    if only is not None and scenario is not None:
        raise InputError("--only selects scenarios of seeds; use it with --seed or --seeds")
    _get_ready()
    console = Console(stderr=json_to == "-")
    if seed is not None or scenario is not None:
        selected = scenario_of(seed, only) if seed is not None else find(str(scenario))
        repeat_with = f"--scenario {shlex.quote(str(scenario))}"
        if seed is not None:
            repeat_with = _selection(seed, only)
        return _one(selected, repeat_with, console, json_to, history_to)
    if history_to is not None:
        raise InputError("--history needs a single run; select it with --seed or --scenario")
    return _many(_range(seeds or "1..50"), only, console, json_to)


def _selection(seed: int, only: str | None) -> str:
    return f"--seed {seed}" if only is None else f"--seed {seed} --only {only}"


def _get_ready() -> None:
    logging.getLogger("holdfast.node").setLevel(logging.ERROR)
    simulate(Scenario("warm-up", "line", 1))  # late imports must not count as simulation time


def _begin() -> None:
    """Initialize a worker process, which only runs seeds."""
    _get_ready()
    gc.disable()  # see `_uncollected`


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: a run creates few cycles, and its objects are discarded together
    at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _range(text: str) -> range:
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if match is None or int(match[1]) > int(match[2]):
        raise InputError(f"--seeds {text!r}: expected the first and the last seed, such as 1..50")
    return range(int(match[1]), int(match[2]) + 1)


def _one(
    scenario: Scenario,
    repeat_with: str,
    console: Console,
    json_to: str | None,
    history_to: str | None,
) -> int:
    with _uncollected():
        began = time.process_time()
        outcome = simulate(scenario)
        seconds = time.process_time() - began
    if history_to is not None:
        outcome.history.write(history_to)
    console.print(outcome.world.transcript(), markup=False, highlight=False, soft_wrap=True)
    _print_verdicts(outcome, console)
    console.print(_speed(outcome.node_seconds, seconds), highlight=False, soft_wrap=True)
    if outcome.failed:
        _explain(outcome, repeat_with, console)
    _write([_ran(outcome, seconds)], outcome.node_seconds / 60 / seconds, json_to)
    return 1 if outcome.failed else 0


@dataclass(frozen=True, slots=True)
class _Ran:
    """The result of a simulated run."""

    seed: int
    toml: str
    verdicts: list[Verdict]
    node_seconds: float
    #: CPU time of one core.
    seconds: float

    @property
    def failed(self) -> bool:
        return any(verdict.outcome == "failed" for verdict in self.verdicts)


def _ran(outcome: Outcome, seconds: float) -> _Ran:
    scenario = outcome.scenario
    return _Ran(scenario.seed, scenario.toml(), outcome.verdicts, outcome.node_seconds, seconds)


def _run(seed: int, only: str | None) -> _Ran:
    began = time.process_time()
    outcome = simulate(scenario_of(seed, only))
    if seed % 50 == 0:
        gc.collect()
    return _ran(outcome, time.process_time() - began)


def _all(seeds: range, only: str | None) -> Iterator[_Ran]:
    """Run the seeds in parallel, one process per core; seeds are independent of each other."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn"), initializer=_begin) as pool:
        yield from pool.map(partial(_run, only=only), seeds)


def _many(seeds: range, only: str | None, console: Console, json_to: str | None) -> int:
    failed: list[_Ran] = []
    outcomes: Counter[tuple[str, str]] = Counter()
    node_seconds = seconds = 0.0
    checkers: list[str] = []
    runs = _all(seeds, only)
    for ran in track(runs, "simulating", len(seeds), console=console, transient=True):
        node_seconds, seconds = node_seconds + ran.node_seconds, seconds + ran.seconds
        checkers = [verdict.checker for verdict in ran.verdicts]
        outcomes.update((verdict.checker, verdict.outcome) for verdict in ran.verdicts)
        if ran.failed:
            failed.append(ran)
            failing_checkers = [
                verdict.checker for verdict in ran.verdicts if verdict.outcome == "failed"
            ]
            console.print(f"seed {ran.seed} failed: {', '.join(failing_checkers)}", highlight=False)
    width = max(len(checker) for checker in checkers)
    console.print(f"{'checker':<{width}}      ok  failed  unknown", highlight=False)
    for checker in checkers:
        counts = [outcomes[checker, outcome] for outcome in ("ok", "failed", "unknown")]
        console.print(
            f"{checker:<{width}}  {counts[0]:>6}  {counts[1]:>6}  {counts[2]:>7}", highlight=False
        )
    speed = _speed(node_seconds, seconds)
    summary = f"{len(seeds)} seeds, {len(failed)} failed; {speed}"
    console.print(summary, highlight=False, soft_wrap=True)
    if failed:
        console.print(f"\nfailed: seeds {', '.join(str(ran.seed) for ran in failed[:20])}")
        first = simulate(scenario_of(failed[0].seed, only))
        _print_verdicts(first, console)
        _explain(first, _selection(failed[0].seed, only), console)
    _write(failed, node_seconds / 60 / seconds, json_to)
    return 1 if failed else 0


def _speed(node_seconds: float, seconds: float) -> str:
    minutes = node_seconds / 60
    return (
        f"{minutes:.1f} simulated node-minutes in {seconds:.2f} s of one core "
        f"({minutes / seconds:.0f} per second)"
    )


def _print_verdicts(outcome: Outcome, console: Console) -> None:
    table = verdict_table(outcome.verdicts, since_us=EPOCH_US)
    console.print(table, markup=False, highlight=False, soft_wrap=True)


def _explain(outcome: Outcome, repeat_with: str, console: Console) -> None:
    """Print the smallest scenario found that fails the same checkers, and the command that repeats
    the failure."""
    names = {verdict.checker for verdict in outcome.failed}

    def fails(scenario: Scenario) -> bool:
        return bool(names & {verdict.checker for verdict in simulate(scenario).failed})

    smallest = shrink(outcome.scenario, fails)
    replayed = simulate(smallest)
    console.print("\nthe smallest scenario found that fails one of the same checkers:\n")
    console.print(smallest.toml(), markup=False, highlight=False)
    lines = _upto(replayed).splitlines()
    console.print(f"the last {min(LINES, len(lines))} of its {len(lines)} events:\n")
    console.print("\n".join(lines[-LINES:]), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nrepeat: holdfast simulate {repeat_with}", highlight=False, soft_wrap=True)


def _upto(outcome: Outcome) -> str:
    """The transcript up to the last failure."""
    failed_at = [verdict.at for verdict in outcome.failed if verdict.at is not None]
    return outcome.world.transcript(to_us=max(failed_at, default=2**62))


def _write(runs: list[_Ran], rate: float, to: str | None) -> None:
    if to is None:
        return
    report: dict[str, Any] = {
        "ok": not any(ran.failed for ran in runs),
        "node_minutes_per_second": round(rate, 1),
        "runs": [
            {
                "seed": ran.seed,
                "scenario": ran.toml,
                "verdicts": [asdict(verdict) for verdict in ran.verdicts],
            }
            for ran in runs
        ],
    }
    write_json(report, to)
