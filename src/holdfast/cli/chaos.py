"""`holdfast chaos`: runs one scenario on real processes and judges its results."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli.interrupts import Interrupts, kill_all
from holdfast.errors import HoldfastError, InputError
from holdfast.verify.chaos import SCENARIOS, find
from holdfast.verify.checkers import check, verdict_table, write_json
from holdfast.verify.history import Began, History
from holdfast.verify.scenario import Scenario, read_scenario


def run_chaos(name: str | None, *, json_to: str | None, history_to: str | None) -> int:
    console = Console(stderr=json_to == "-")
    if name is None:
        console.print(_listed())
        return 0
    scenario = find(name)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim] {text}", highlight=False)

    history, storage = _run(scenario, say)
    if history_to is not None:
        history.write(history_to)
    verdicts = check(history, monitored=True)
    failed = [verdict.checker for verdict in verdicts if verdict.outcome == "failed"]
    table = verdict_table(verdicts, since_us=next(history.of(Began)).at)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    if failed:
        console.print(f"[red]{scenario.name}: failed ({', '.join(failed)})[/red]")
        console.print(f"logs of the run: {storage}", soft_wrap=True)
        console.print(f"repeat: holdfast chaos {shlex.quote(name)}", soft_wrap=True)
    else:
        console.print(f"{scenario.name}: ok, {time.monotonic() - began:.0f} s")
    report = {"scenario": scenario.name, "network": scenario.network, "ok": not failed,
              "verdicts": [asdict(verdict) for verdict in verdicts]}  # fmt: skip
    if json_to is not None:
        write_json(report, json_to)
    return 1 if failed else 0


def _run(scenario: Scenario, say: Any) -> tuple[History, str]:
    from holdfast.engine import session
    from holdfast.runtime.running import Run
    from holdfast.verify.chaos.deployed_networks import NETWORKS
    from holdfast.verify.chaos.deployment import OPTIONS, Deployment
    from holdfast.verify.chaos.process_faults import check as check_faults
    from holdfast.verify.chaos.runner import run_scenario

    if scenario.network not in NETWORKS:
        raise InputError(
            f"scenario {scenario.name!r}: network {scenario.network!r} is not one of "
            f"{', '.join(NETWORKS)}"
        )
    check_faults(scenario, NETWORKS[scenario.network])
    say(f"{scenario.name}: {scenario.about or 'starting'}")
    started: list[Run] = []
    with Interrupts(lambda: kill_all(started)):
        spark = session.start(OPTIONS, name="holdfast-chaos").large
        deployment = Deployment(scenario.network, spark)
        started.append(deployment.run)
        with deployment:
            say(f"network {scenario.network} is running: {_pids(deployment)}")
            history = run_scenario(scenario, deployment, say)
            verdicts = check(history, monitored=True)
            deployment.keep_storage = any(verdict.outcome == "failed" for verdict in verdicts)
    if leftovers := deployment.left():
        raise HoldfastError(
            f"processes still running after the run: {'; '.join(leftovers)}; kill them"
        )
    return history, deployment.storage


def _pids(deployment: Any) -> str:
    return ", ".join(
        f"{name} (pid {process.pid})" for name, process in deployment.run.processes.items()
    )


def _listed() -> Table:
    table = Table(box=None)
    for column in ("scenario", "network", "what happens"):
        table.add_column(column)
    for name, path in SCENARIOS.items():
        scenario = read_scenario(path)
        table.add_row(name, scenario.network, scenario.about)
    return table
