"""Networks, status and reports for people."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
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
            state = "convergent" if op.convergent else "not convergent: kept for ever"
        reads = ", ".join(up.name for up in op.inputs if up is not None)
        table.add_row(op.name, op.kind, reads, compiled.schema.get(op.name, ""), state)
    console.print(table)
    for op in network.outputs:
        contract = op.contract
        console.print(
            f"output {op.name}: within {contract.within or 'any time'}, loss at most "
            f"{contract.loss:g}, order {contract.order}"
        )


def show_status(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told, indent=2))
        return
    console = Console()
    about = f"network [bold]{told['network']}[/bold], deployment {told['deployment']}"
    pid = f", pid {told['pid']}" if "pid" in told else ""
    state = told.get("state", "running")
    console.print(about + pid + ("" if state == "running" else f", {state}"), highlight=False)
    sources = Table(title="sources")
    for column in ("source", "complete up to", "rows", "late", "future", "dead letters"):
        sources.add_column(column, justify="left" if column == "source" else "right")
    for name, source in told["sources"].items():
        counts = (source[key] for key in ("rows", "late_rows", "future_rows", "dead_letter_rows"))
        sources.add_row(name, str(source["complete_upto"]), *map(str, counts))
    console.print(sources)
    for name, source in told["sources"].items():
        if source["restamped_rows"]:
            console.print(f"[yellow]source {name}: {source['restamped_rows']} rows were given "
                          "another time (late='restamp')[/yellow]")  # fmt: skip
        if source["clock_steps"] or abs(source["clock_apart_ms"]) > 100:
            console.print(f"[yellow]source {name}: the wall clock was set {source['clock_steps']} "
                          f"times; the source clock is {source['clock_apart_ms'] / 1_000:.1f} s "
                          "ahead of it[/yellow]")  # fmt: skip
    nodes = Table(title="nodes")
    shared = any(node.get("host", node["node"]) != node["node"] for node in told["nodes"])
    for column in (
        *(["host"] if shared else []),
        "node",
        "path",
        "state",
        "position",
        "waits for",
        "step ms",
        "rows kept",
        "checkpoint",
    ):
        nodes.add_column(column)
    known = {failure["node"] for failure in told["failures"]}
    for node in told["nodes"]:
        if node.get("failure") and node["node"] not in known:
            console.print(f"[red]node {node['node']} stopped: {node['failure']}[/red]")
        if not node.get("paths"):
            row = ["", "[red]no answer[/red]", *[""] * 5]
            nodes.add_row(*([node["host"]] if shared else []), node["node"], *row)
        for name, path in node.get("paths", {}).items():
            nodes.add_row(
                *([node["host"]] if shared else []),
                node["node"],
                name,
                _state(path),
                str(path["position"]),
                ", ".join(path["waiting_for"]),
                str(node["step_ms"]),
                str(path["state_rows"]),
                str(path["checkpoint"]),
            )
    console.print(nodes)
    for host, process in told.get("processes", {}).items():
        runs = ", ".join(told["hosts"][host])
        console.print(
            f"host {host}: pid {process['pid']}, restarted {process['restarts']} times, "
            + (f"runs {runs}" if runs else "stands by"),
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for name, contract in told["contracts"].items():
        parts = [contract_word(contract), f"reader at bucket {contract['position']}"]
        if contract["delay_ms"] is not None:
            parts.append(f"{contract['delay_ms']:.0f} ms after its end")
        if contract["breaks"]:
            parts.append(f"{contract['breaks']} breaks, worst {contract['worst_ms']:.0f} ms")
        console.print(
            f"output {name}, within {contract['within'] or 'any time'}: {', '.join(parts)}",
            style=None if contract["kept"] else "red",
            highlight=False,
            soft_wrap=True,
        )
    for part in told.get("unhealthy", ()):
        console.print(_unhealthy(part), highlight=False, soft_wrap=True)
    for node, differences in told.get("differs", {}).items():
        for text in differences:
            console.print(
                f"[red]node {node}: replicas differ:[/red] {escape(text)}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    for output, why in told.get("stopped", {}).items():
        console.print(
            f"[bold red]output {output} stopped, no replica is left:[/bold red] {escape(why)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for failure in told["failures"]:
        stops = ", ".join(failure["outputs"])
        what = "failed" if failure["permanent"] else "has trouble and tries again"
        console.print(
            f"{failure['node']} {what}" + (f" ({stops} depends on it)" if stops else "")
            + f": {failure['message']}",
            style="red" if failure["permanent"] else "yellow", highlight=False, soft_wrap=True,
            markup=False,
        )  # fmt: skip


def _unhealthy(part: dict[str, Any]) -> str:
    """What it is, why, for how long, what follows, and what to do."""
    color = "red" if part["out"] else "yellow"
    told = [f"{part['state']} for {part['for_ms'] / 1_000:.0f} s"]
    if part["failures"] > 1:
        told.append(f"{part['failures']} failures in a row")
    if part["retry_in_ms"] is not None:
        told.append(f"next try in {part['retry_in_ms'] / 1_000:.0f} s")
    where = f" on {part['host']}" if part["what"] == "node" else ""
    text = escape(f"{part['reason'].rstrip('.')}. To do: {part['remedy']}")
    return f"[{color}]{part['what']} {part['part']}{where} {', '.join(told)}[/{color}]: {text}"


def _state(path: dict[str, Any]) -> str:
    color = {"STABLE": "green", "UP_FAILURE": "red"}.get(path["state"], "yellow")
    upto = path["tentative_upto"]
    tentative = "" if upto is None else f", tentative up to {upto}"
    return f"[{color}]{path['state']}[/{color}]{tentative}"


def contract_word(contract: dict[str, Any]) -> str:
    """`kept`, or `BROKEN` with what a reader wants to know first."""
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
