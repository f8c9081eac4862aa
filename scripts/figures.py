"""Render the tables and plots of the documents from stored results (`make figures`).

`docs/results/NAME.json` is the output of `holdfast experiment NAME --json`. A document contains the
table of an experiment between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`. The
README contains the table `costs`, with figures of several experiments.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from holdfast.experiments import spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PLOTS = ROOT / "docs" / "figures"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "experiments.md")
#: The experiments that the table `costs` shows.
COSTS = (
    "serialization", "vs-structured-streaming", "vs-peers", "overhead", "pairs", "endurance",
)  # fmt: skip
BLOCK = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Result = dict[str, Any]


def stored_results() -> dict[str, Result]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def experiment(name: str) -> Any:
    return importlib.import_module(f"holdfast.experiments.{name.replace('-', '_')}")


def markdown(table: Table) -> str:
    """The table that the command prints, as Markdown, with the lines of its caption below."""
    header = [str(column.header) for column in table.columns]
    align = ["---" if column.justify == "left" else "---:" for column in table.columns]
    cells = zip(*(list(column.cells) for column in table.columns), strict=True)
    rows = [header, align, *([str(cell) for cell in row] for row in cells)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if table.caption:
        lines += ["", *(f"- {caption}" for caption in str(table.caption).splitlines())]
    return "\n".join(lines)


def provenance(result: Result) -> str:
    measured = result["measured"]
    return (
        f"`{measured['command']}`, measured on {measured['on']} in {measured['minutes']:.0f} "
        f"minutes; {measured['cores']} cores, {measured['busy']:.0%} busy on average."
    )


def costs(results: Mapping[str, Result]) -> str:
    """The table `costs` of the README, from those results of `COSTS` that are stored."""
    rows = [("", "Holdfast", "compared with")]
    if "serialization" in results:
        delays = {row["interval_ms"]: row for row in results["serialization"]["rows"]}
        rows += [
            (
                f'mean delay from source to client, {width_ms} ms buckets, `grace="0s"`',
                f"{delays[width_ms]['mean_ms']:.0f} ms",
                f"Borealis (2005): {delays[width_ms]['paper_ms']} ms",
            )
            for width_ms in (50, 100, 300)
        ]
    if "vs-structured-streaming" in results:
        rows += _against_structured_streaming(results["vs-structured-streaming"])
    if "vs-peers" in results:
        rows.append(_against_peers(results["vs-peers"]))
    if "overhead" in results:
        rows.append(_cost_of_replicas(results["overhead"]["replicas"]))
    if "pairs" in results:
        done = results["pairs"]["rows_per_s_done"]
        ratios = [pair / one for pair, one in zip(done["flux"], done["plain"], strict=True)]
        ratio = (
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in five "
            "rounds, in some of which a healthy replica was evicted) of the rows/s of one replica"
        )
        rows.append(("every partition as a pair", ratio, "Flux (2004): 0.44"))
    if "endurance" in results:
        endurance = results["endurance"]
        files = [sample["files"] for sample in endurance["samples"]]
        rows.append(
            (
                f"{endurance['buckets']:,} buckets in one run",
                f"memory {endurance['rss_growth']:+.1%}, step time "
                f"{endurance['step_growth']:+.1%}, {min(files):.0f} to {max(files):.0f} files",
                "since bucket 1,000; smallest and largest number of files",
            )
        )
    header, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * 3, *body))


def _against_peers(result: Result) -> tuple[str, str, str]:
    def rate(system: str) -> str:
        low, high = result["spread"][system]
        middle = result["rows_per_s"][system]
        return f"{middle / 1e6:.2f} ({low / 1e6:.2f} to {high / 1e6:.2f}) M rows/s"

    arrow = result["rows_per_s"]["bytewax_arrow"] / 1e6
    return (
        "windowed count and sum from files, 200,000 rows a bucket",
        f"{rate('holdfast')}, results flushed",
        f"Flink SQL, checkpoints every second: {rate('flink')}; Arrow in a function of Bytewax, "
        f"not flushed, at least once: {arrow:.0f} M rows/s",
    )


def _cost_of_replicas(runs: list[Result]) -> tuple[str, str, str]:
    def median(key: str, replicas: int) -> float:
        return float(statistics.median(r[key] for r in runs if r["replicas"] == replicas))

    ratio = median("cpu_ms", 2) / median("cpu_ms", 1)
    return (
        "two replicas of a node, without failures",
        f"{ratio:.2f} times the CPU time; delay {median('delay_ms', 2):.0f} ms",
        f"one replica: {median('delay_ms', 1):.0f} ms",
    )


def _against_structured_streaming(result: Result) -> list[tuple[str, str, str]]:
    """Rows of `costs`. Of the state stores of Structured Streaming, the faster one counts."""
    runs = result["runs"]

    def best(query: str, form: str, key: str) -> Result | None:
        sides = [one[key] for side, one in runs[query].items() if side.startswith(form)]
        choose = max if key == "rows_per_s" else min
        return choose(sides, key=lambda one: float(one["median"])) if sides else None

    def text(query: str, form: str, key: str) -> str:
        one = best(query, form, key)
        assert one is not None
        if key == "rows_per_s":
            return f"{spread([value / 1e6 for value in one['repeats']], 2)} M rows/s"
        return spread(one["repeats"]).replace(" (", " ms (", 1)

    def both(query: str, key: str) -> str:
        forms = [form for form in ("tuned", "installed") if best(query, form, key)]
        names = {"tuned": "tuned", "installed": "as installed"}
        return "; ".join(f"{names[form]}: {text(query, form, key)}" for form in forms)

    ends = result["end_to_end"]
    rows = [
        (
            "step of the engine, every bucket folded at once (not the default), no fsync: result "
            "of a 1 s window, 1,000 rows a bucket, median (range)",
            text("tumbling", "holdfast", "due_ms"),
            f"Structured Streaming {both('tumbling', 'due_ms')}",
        ),
        (
            "the same steps with 200,000 rows a bucket, one bucket a step",
            text("large", "holdfast", "rows_per_s"),
            both("large", "rows_per_s"),
        ),
        (
            "the same, ten buckets a step",
            text("large_10", "holdfast", "rows_per_s"),
            both("large_10", "rows_per_s"),
        ),
        (
            "200,000 rows a bucket in the default mode (where a bucket above 100,000 rows is "
            "folded at once, too)",
            f"{text('lazy_large', 'holdfast', 'due_ms')} to a result, "
            f"{text('lazy_large', 'holdfast', 'rows_per_s')}",
            f"tuned: {text('large', 'tuned', 'due_ms')} to a result",
        ),
        (
            "a step of count windows, 100,000 rows and keys",
            text("count", "holdfast", "step_ms"),
            "fastest of three ways: "
            + "{1}, {0:,.0f} ms".format(
                *min((ms, way) for way, ms in result["count_window_ms"].items())
            ),
        ),
        (
            'end of a window to its consumer, results flushed, `grace="0s"` (one run)',
            f"{ends['holdfast']['final_ms']:.0f} ms",
            "tuned (checkpoints not flushed, includes the wait for the watermark): "
            f"{ends['structured_streaming']['final_ms']:.0f} ms",
        ),
    ]
    if live := result.get("realtime"):

        def side(of: str, again: str) -> str:
            return (
                f"updates (from the row) {live['update_ms'][of]:,.0f} ms, final results (from the "
                f"end of the window) {live['final_ms'][of]:,.0f} ms; after SIGKILL{again}"
            )

        twice = live["duplicates_after_kill"]
        ours = f" of one of two replicas, {twice['holdfast']:,} results delivered twice"
        theirs = f", {twice['structured_streaming']:,} updates written twice"
        rows.append(
            (
                'delay of a row in a windowed count, `grace="0s"` (one run)',
                side("holdfast", ours),
                f"real-time mode, batches of 5 s: {side('structured_streaming', theirs)}",
            )
        )
    return rows


def render(text: str, results: Mapping[str, Result]) -> str:
    """The document with every table rendered again."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if not results.keys() & {*(COSTS if name == "costs" else (name,))}:
            return match[0]  # not measured in full yet
        if name == "costs":
            return f"{begin}{costs(results)}\n{end}"
        result = results[name]
        table = markdown(experiment(name).table(result))
        return f"{begin}{table}\n\n{provenance(result)}\n{end}"

    return BLOCK.sub(block, text)


def draw(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Draw the plots of all stored results."""
    import matplotlib

    matplotlib.use("Agg")
    return [
        Path(plot)
        for name, result in results.items()
        for plot in experiment(name).plot(result, str(folder))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a table is old"
    )
    check = parser.parse_args().check
    results, old = stored_results(), []
    for document in DOCUMENTS:
        text = document.read_text()
        if (rendered := render(text, results)) != text:
            old.append(document.relative_to(ROOT))
            if not check:
                document.write_text(rendered)
    if check:
        for name in old:
            print(f"{name}: a table differs from docs/results; run: make figures", file=sys.stderr)
        return 1 if old else 0
    for path in draw(results, PLOTS):
        print(f"drew {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
