"""Formats networks, contracts and audit reports for the terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.config import duration_text


def show_network(network: Any, compiled: Any) -> None:
    console = Console()
    table = Table(
        title=f"network {network.name}: well formed, buckets of {duration_text(network.width_us)}"
    )
    for column in ("operator", "kind", "reads", "rows", "state"):
        table.add_column(column, overflow="fold")
    for op in network.operators:
        state = "-"
        if op.stateful:
            state = "convergent" if op.convergent else "not convergent: retained forever"
        reads = ", ".join(up.name for up in op.inputs if up is not None)
        table.add_row(op.name, op.kind, reads, compiled.schema.get(op.name, ""), state)
    console.print(table)
    for op in network.outputs:
        contract = op.contract
        console.print(
            f"output {op.name}: within {contract.within or 'any time'}, loss at most "
            f"{contract.loss:g}, order {contract.order}"
        )


def contract_word(contract: dict[str, Any]) -> str:
    """`kept`, `not judged`, or `BROKEN` with duration, cause and lost buckets."""
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
    return "kept"


def show_report(report: Any, json_to: str | None) -> None:
    if json_to == "-":
        json.dump(report.json(), sys.stdout, indent=2)
        print()
        return
    if json_to is not None:
        with open(json_to, "w") as file:
            json.dump(report.json(), file, indent=2)
    print(report.text())
