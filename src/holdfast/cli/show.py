"""Formats networks, contracts and audit reports for the terminal."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.config import duration_text
from holdfast.model.protection import Protection
from holdfast.verify.checkers import write_json

NOT_CONVERGENT = "not convergent"
REPLAYED = "not convergent: with recovery='replay' its inputs are retained forever"


def show_network(network: Any, compiled: Any) -> None:
    console = Console()
    table = Table(
        title=f"network {network.name}: well formed, buckets of {duration_text(network.width_us)}"
    )
    for column in ("operator", "kind", "reads", "schema", "state"):
        table.add_column(column, overflow="fold")
    for op in network.operators:
        state = "-"
        if op.stateful:
            replayed = network.protection(op.fragment).recovery in (None, "replay")
            lasting = REPLAYED if replayed else NOT_CONVERGENT
            state = "convergent" if op.convergent else lasting
        reads = ", ".join(up.name for up in op.inputs if up is not None)
        table.add_row(op.name, op.kind, reads, compiled.schema.get(op.name, ""), state)
    console.print(table)
    for op in network.outputs:
        contract = op.contract
        limit = "no time limit" if contract.within is None else f"within {contract.within}"
        console.print(
            f"output {op.name}: {limit}, loss at most {contract.loss:g}, order {contract.order}"
        )
    for fragment, protection in network.protections.items():
        console.print(f"fragment {fragment}: {_stated(protection)}", markup=False, highlight=False)


def _stated(protection: Protection) -> str:
    """The options that differ from their defaults."""
    held = ((option.name, getattr(protection, option.name)) for option in fields(protection))
    usual = Protection()
    stated = [f"{name}={value!r}" for name, value in held if value != getattr(usual, name)]
    return ", ".join(stated) or "options of protect are the defaults"


def contract_word(contract: dict[str, Any]) -> str:
    """`kept`, `not judged`, `-` without a promised delay, or `BROKEN` with duration, cause and lost
    buckets."""
    broken = []
    if contract["broken_for_ms"] is not None:
        waits = ", ".join(contract["waiting_for"])
        broken.append(f"for {contract['broken_for_ms'] / 1_000:.1f}s: waiting for {waits}")
    if contract["breaks_of"]["loss"]:
        broken.append(f"{contract['lost_buckets']} buckets lost")
    if broken:
        return "BROKEN " + "; ".join(broken)
    if contract["within"] is not None and contract["not_judged"] is not None:
        return f"not judged: {contract['not_judged']}"
    return "kept" if contract["within"] is not None else "-"


def broken_text(output: str, contract: dict[str, Any]) -> str:
    """How often and how badly a contract was broken during a run."""
    times = "once" if contract["breaks"] == 1 else f"{contract['breaks']} times"
    effects = []
    if contract["breaks_of"]["within"]:
        effects.append(f"buckets up to {contract['worst_ms']:.0f} ms overdue")
    if contract["breaks_of"]["loss"]:
        effects.append(f"{contract['lost_buckets']} buckets lost")
    return f"{output}: contract broken {times}; {', '.join(effects)}"


def show_report(report: Any, json_to: str | None) -> None:
    if json_to is not None:
        write_json(report.json(), json_to)
    if json_to != "-":
        print(report.text())
