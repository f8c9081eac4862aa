"""`holdfast simulate`: seeds by the hundred, and a failing one made small enough to read."""

from __future__ import annotations

import gc
import logging
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import track

from holdfast.chaos import find
from holdfast.checkers import Verdict, verdict_table, write_verdicts
from holdfast.errors import InputError
from holdfast.scenario import Scenario
from holdfast.sim.chance import scenario_of
from holdfast.sim.simulation import Outcome, shrink, simulate
from holdfast.sim.world import EPOCH_US

#: A transcript of a whole run is long; what led to the failure is at its end.
LINES = 40


def run_simulate(
    *,
    seed: int | None = None,
    seeds: str | None = None,
    scenario: str | None = None,
    json_to: str | None = None,
    history_to: str | None = None,
) -> int:
    logging.getLogger("holdfast.node").setLevel(logging.ERROR)
    simulate(Scenario("warm-up", "line", 1))  # what is imported late should not count as slow
    console = Console(stderr=json_to == "-")
    if seed is not None or scenario is not None:
        one = scenario_of(seed) if seed is not None else find(str(scenario))
        again = f"--seed {seed}" if seed is not None else f"--scenario {shlex.quote(str(scenario))}"
        return _one(one, again, console, json_to, history_to)
    if history_to is not None:
        raise InputError("--history is for one run: name it with --seed or --scenario")
    return _many(_range(seeds or "1..50"), console, json_to)


def _range(text: str) -> range:
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if match is None or int(match[1]) > int(match[2]):
        raise InputError(f"--seeds {text!r}: write the first and the last, such as 1..50")
    return range(int(match[1]), int(match[2]) + 1)


def _one(
    scenario: Scenario, again: str, console: Console, json_to: str | None, history_to: str | None
) -> int:
    began = time.process_time()
    outcome = simulate(scenario)
    seconds = time.process_time() - began
    if history_to is not None:
        outcome.history.write(history_to)
    console.print(outcome.world.transcript(), markup=False, highlight=False, soft_wrap=True)
    _print_verdicts(outcome, console)
    console.print(_speed(outcome.node_seconds, seconds), highlight=False, soft_wrap=True)
    if outcome.failed:
        _explain(outcome, again, console)
    _write([outcome], outcome.node_seconds / 60 / seconds, json_to)
    return 1 if outcome.failed else 0


def _many(seeds: Iterable[int], console: Console, json_to: str | None) -> int:
    kept: list[Outcome] = []
    outcomes: Counter[tuple[str, str]] = Counter()
    node_seconds, runs, began = 0.0, 0, time.process_time()
    checkers: list[str] = []
    gc.disable()  # a run makes no cycles worth looking for, and is thrown away whole
    try:
        for seed in track(seeds, "simulating", console=console, transient=True):
            outcome = simulate(scenario_of(seed))
            runs, node_seconds = runs + 1, node_seconds + outcome.node_seconds
            checkers = [verdict.checker for verdict in outcome.verdicts]
            outcomes.update((verdict.checker, verdict.outcome) for verdict in outcome.verdicts)
            if outcome.failed:
                kept.append(outcome)
            if runs % 50 == 0:
                gc.collect()
    finally:
        gc.enable()
    seconds = time.process_time() - began
    width = max(len(checker) for checker in checkers)
    console.print(f"{'checker':<{width}}      ok  failed  unknown", highlight=False)
    for checker in checkers:
        counts = [outcomes[checker, outcome] for outcome in ("ok", "failed", "unknown")]
        console.print(
            f"{checker:<{width}}  {counts[0]:>6}  {counts[1]:>6}  {counts[2]:>7}", highlight=False
        )
    speed = _speed(node_seconds, seconds)
    console.print(f"{runs} seeds, {len(kept)} failed; {speed}", highlight=False, soft_wrap=True)
    if kept:
        first = kept[0]
        console.print(f"\nfailed: seeds {', '.join(str(o.scenario.seed) for o in kept[:20])}")
        _print_verdicts(first, console)
        _explain(first, f"--seed {first.scenario.seed}", console)
    _write(kept, node_seconds / 60 / seconds, json_to)
    return 1 if kept else 0


def _speed(node_seconds: float, seconds: float) -> str:
    minutes = node_seconds / 60
    return (
        f"{minutes:.1f} simulated node-minutes in {seconds:.2f} s of one core "
        f"({minutes / seconds:.0f} a second)"
    )


def _print_verdicts(outcome: Outcome, console: Console) -> None:
    table = verdict_table(outcome.verdicts, since_us=EPOCH_US)
    console.print(table, markup=False, highlight=False, soft_wrap=True)


def _explain(outcome: Outcome, again: str, console: Console) -> None:
    """The same failure with as little around it as possible, and how to see it again."""
    names = {verdict.checker for verdict in outcome.failed}

    def fails(scenario: Scenario) -> bool:
        return bool(names & {verdict.checker for verdict in simulate(scenario).failed})

    small = shrink(outcome.scenario, fails)
    short = simulate(small)
    console.print("\nthe smallest scenario found that fails like this:\n")
    console.print(small.toml(), markup=False, highlight=False)
    lines = _upto(short).splitlines()
    console.print(f"its last {min(LINES, len(lines))} of {len(lines)} events:\n")
    console.print("\n".join(lines[-LINES:]), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nrepeat: holdfast simulate {again}", highlight=False, soft_wrap=True)


def _upto(outcome: Outcome) -> str:
    """The transcript up to where the last of the failures was seen."""
    seen = [verdict.at for verdict in outcome.failed if verdict.at is not None]
    return outcome.world.transcript(to_us=max(seen, default=2**62))


def _write(outcomes: list[Outcome], rate: float, to: str | None) -> None:
    if to is None:
        return
    told: dict[str, Any] = {
        "ok": not any(outcome.failed for outcome in outcomes),
        "node_minutes_per_second": round(rate, 1),
        "runs": [
            {"seed": o.scenario.seed, "scenario": o.scenario.toml(), "verdicts": _plain(o.verdicts)}
            for o in outcomes
        ],
    }
    write_verdicts(told, to)


def _plain(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    return [asdict(verdict) for verdict in verdicts]
