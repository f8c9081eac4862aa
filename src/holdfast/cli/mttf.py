"""`holdfast reliability LAYOUT`: mean time to failure of cluster pairs and partition pairs.

    nodes = 8
    node_mttf = "30d"
    repair = "10s"            # detection, take-over and catch-up of one node
    repair_cluster = "40s"    # of a replica set (default: nodes / 2 * repair)
    placement = "chained"     # or "mirrored"

docs/reliability.md explains the figures and their limits.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.config import duration_us
from holdfast.errors import InputError
from holdfast.model import reliability
from holdfast.model.reliability import RUNS, SCHEMES, Layout, Scheme

_KEYS = ("nodes", "node_mttf", "repair", "repair_cluster", "placement")
_SPANS_S = {"years": 31_557_600.0, "days": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0}


def run_reliability(args: argparse.Namespace) -> int:
    layout = read_layout(args.layout)
    args.runs = RUNS if args.runs is None else args.runs
    report = {
        "layout": asdict(layout), "both_fail": not args.as_paper,
        "constant_repair": args.constant_repair, "runs": args.runs, "seed": args.seed,
        "schemes": [_figures(layout, args, scheme) for scheme in SCHEMES],
    }  # fmt: skip
    if args.json == "-":
        print(json.dumps(report, indent=2))
        return 0
    if args.json is not None:
        try:
            Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
        except OSError as err:
            raise InputError(f"--json {args.json} cannot be written: {err.strerror}") from None
    _print(layout, report)
    return 0


def read_layout(path: str) -> Layout:
    try:
        body = tomllib.loads(Path(path).read_text())
    except OSError as err:
        raise InputError(f"{path} cannot be read: {err.strerror}") from None
    except ValueError as err:  # TOMLDecodeError, UnicodeDecodeError
        raise InputError(f"{path}: not TOML ({err})") from None
    unknown = sorted(set(body) - set(_KEYS))
    if unknown:
        raise InputError(f"{path}: unknown keys {', '.join(unknown)}; expected {', '.join(_KEYS)}")
    missing = [key for key in _KEYS[:3] if key not in body]
    if missing:
        raise InputError(f"{path}: missing keys {', '.join(missing)}")
    nodes = body["nodes"]
    if type(nodes) is not int:
        raise InputError(f"{path}: nodes = {nodes!r} is not a whole number")
    spans_s = {
        key: duration_us(body[key], of=f"{path}: {key}") / 1e6 for key in _KEYS[1:4] if key in body
    }
    repair_s = spans_s["repair"]
    try:
        return Layout(
            nodes=nodes,
            node_mttf_s=spans_s["node_mttf"],
            repair_s=repair_s,
            repair_cluster_s=spans_s.get("repair_cluster", nodes / 2 * repair_s),
            placement=body.get("placement", "chained"),
        )
    except InputError as err:
        raise InputError(f"{path}: {err}") from None


def _figures(layout: Layout, args: argparse.Namespace, scheme: Scheme) -> dict[str, Any]:
    units = reliability.units_of(layout, scheme, both_fail=not args.as_paper)
    simulated = reliability.simulate(
        units, runs=args.runs, seed=args.seed, constant_repair=args.constant_repair
    )
    return {
        "scheme": scheme,
        "mttf_paper_s": reliability.paper_mttf_s(layout, scheme),
        "mttf_limit_s": reliability.limit_mttf_s(units),
        "mttf_exact_s": reliability.exact_mttf_s(units),
        "mttf_simulated_s": simulated.mttf_s,
        "ci95_s": simulated.ci95_s,
    }


def _print(layout: Layout, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"mean time to failure, {layout.nodes} nodes, {layout.placement}")
    table.add_column("scheme")
    for column in ("paper", "exact", "simulated", "95 %"):
        table.add_column(column, justify="right")
    for row in report["schemes"]:
        share = row["ci95_s"] / row["mttf_simulated_s"]
        exact_s = row["mttf_exact_s"]
        table.add_row(
            row["scheme"], _span(row["mttf_paper_s"]), "-" if exact_s is None else _span(exact_s),
            _span(row["mttf_simulated_s"]), f"± {share:.1%}",
        )  # fmt: skip
    console.print(table)
    first = "either node of a pair" if report["both_fail"] else "only the primary of a pair"
    low, high = _span(layout.repair_s), _span(layout.nodes * layout.repair_s)
    lines = [
        f"fails first: {first}",
        f"repair of a replica set {_span(layout.repair_cluster_s)}; the paper: {low} to {high}",
    ]
    if any(row["mttf_exact_s"] is None for row in report["schemes"]):
        lines.append(
            "exact -: not computed, too many nodes are down at once to enumerate all states"
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _span(seconds: float) -> str:
    unit = next((unit for unit, span_s in _SPANS_S.items() if seconds >= span_s), "s")
    value = seconds / _SPANS_S[unit]
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
