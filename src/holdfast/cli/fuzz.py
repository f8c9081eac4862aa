"""`holdfast verify fuzz`: runs random networks, and shrinks a failing one."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.config import Options
from holdfast.engine import session
from holdfast.engine.session import Sessions
from holdfast.errors import InputError
from holdfast.verify.checkers import write_json
from holdfast.verify.fuzz.case import Case
from holdfast.verify.fuzz.kinds import ALL, label
from holdfast.verify.fuzz.shrink import shrink
from holdfast.verify.fuzz.tester import Failure, Summary, Variant, check, check_seed

#: Networks between two lines that report the progress.
_EVERY = 10


def run_fuzz(
    *,
    networks: int,
    seed: int,
    minutes: float | None,
    deployments: int,
    case: str | None,
    json_to: str | None,
) -> int:
    console = Console(stderr=json_to == "-")
    sessions = session.start(Options(master="local[2]", memory="1g"))
    if case is not None:
        return _one(*_read(case), sessions, console)
    summary, began = Summary(), time.monotonic()
    until = began + 60 * minutes if minutes is not None else None
    for number in range(networks):
        if until is not None and time.monotonic() > until:
            break
        deploy = deployments > 0 and number % deployments == deployments - 1
        failure = check_seed(seed + number, sessions, summary, deploy=deploy)
        if failure is not None:
            _report(failure, sessions, console)
        if (number + 1) % _EVERY == 0:
            console.print(
                f"[dim]{time.monotonic() - began:6.1f} s[/dim] {summary.networks} networks, "
                f"{summary.runs} runs, {len(summary.failures)} failed", highlight=False,
            )  # fmt: skip
    console.print(_coverage("operators by type of their keys", summary.coverage))
    console.print(_coverage("aggregates by type of their argument", summary.aggregates))
    console.print(
        f"{summary.networks} networks, {summary.runs} runs ({summary.deployed} of them as "
        f"deployments), {summary.rows:,} result rows, {summary.refused} layouts refused by `check`:"
        f" {len(summary.failures)} failed, {time.monotonic() - began:.0f} s", highlight=False,
    )  # fmt: skip
    if json_to is not None:
        _write(summary, json_to)
    return 1 if summary.failures else 0


def _read(path: str) -> tuple[Case, Variant]:
    try:
        with open(path) as file:
            data = json.load(file)
        return Case.from_json(json.dumps(data["case"])), Variant.of(data["variant"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise InputError(
            f"--case {path}: expected a file that `holdfast verify fuzz` wrote ({err})"
        ) from None


def _save(failure: Failure) -> str:
    path = f"fuzz-{failure.case.seed}.json"
    data = {"case": json.loads(failure.case.to_json()), "variant": failure.variant.body()}
    with open(path, "w") as file:
        json.dump(data, file, indent=1, ensure_ascii=False)
    return path


def _one(case: Case, variant: Variant, sessions: Sessions, console: Console) -> int:
    found = check(case, variant, sessions)
    text = str(Failure(case, variant, found)) if found else "no difference"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 1 if found else 0


def _report(failure: Failure, sessions: Sessions, console: Console) -> None:
    """Print the failing network, made small, and the command that repeats it."""
    path = _save(failure)
    console.print(f"seed {failure.case.seed} failed: {failure.differences[0]}", markup=False)
    console.print("shrinking ...")

    def again(case: Case, variant: Variant) -> list[str]:
        return check(case, variant, sessions)

    small = shrink(failure, again)
    _save(small)
    console.print(str(small), markup=False, highlight=False, soft_wrap=True)
    deployed = " --deployments 1" if failure.variant.deployment else ""
    console.print(
        f"repeat it: holdfast verify fuzz --seed {failure.case.seed} --networks 1{deployed}; the "
        f"smaller case: holdfast verify fuzz --case {path}", soft_wrap=True,
    )  # fmt: skip


def _coverage(title: str, counts: Counter[tuple[str, str]]) -> Table:
    """How many networks had each operator or aggregate with each type."""
    table = Table(title=title)
    table.add_column(title.split()[0])
    table.add_column("networks by type")
    table.add_column("never with")
    kinds = {label(kind) for kind in ALL}
    for row in sorted({row for row, _ in counts}):
        types = {kind: n for (of, kind), n in counts.items() if of == row}
        listed = ", ".join(f"{kind} {types[kind]}" for kind in sorted(types))
        missing = "" if set(types) == {"none"} else ", ".join(sorted(kinds - set(types)))
        table.add_row(row, listed, missing)
    return table


def _write(summary: Summary, path: str) -> None:
    data: dict[str, Any] = {
        "networks": summary.networks, "runs": summary.runs, "deployed": summary.deployed,
        "rows": summary.rows, "refused": summary.refused,
        "failed": [failure.case.seed for failure in summary.failures],
        "coverage": {f"{row} {column}": n for (row, column), n in summary.coverage.items()},
        "aggregates": {f"{row} {column}": n for (row, column), n in summary.aggregates.items()},
    }  # fmt: skip
    write_json(data, path)
