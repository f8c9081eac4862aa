"""`holdfast status` for the terminal: the positions of all sources, nodes and outputs in wall-clock
time, and the problems that need attention. Fits 80 columns; `--json` prints the complete status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli.show import contract_word
from holdfast.clock import now_us
from holdfast.core.quarantine import due_text

DAY_S = 86_400.0
_COLORS = {"STABLE": "green", "UP_FAILURE": "red"}
#: States of a path as shown here; STABLE is shown as it is.
_STATES = {"UP_FAILURE": "INPUT MISSING", "STABILIZATION": "CORRECTING"}
#: A path that is later than this shows the inputs that it waits for.
WAITS_S = 2.0
#: Smallest difference between the source clock and the wall clock that is shown.
_APART_MS = 100


def show_status(status: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=2))
        return
    view = _View(status)
    console = Console()
    console.print(view.headline(), highlight=False, soft_wrap=True)
    for table in (view.sources(), view.nodes(), view.outputs()):
        if table.row_count:
            console.print()
            console.print(table)
    for number, line in enumerate(view.notices()):
        if number == 0:
            console.print()
        console.print(line, highlight=False, soft_wrap=True)


class _View:
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status
        self._width_us = status.get("bucket_us")
        ends = [self._end_s(source["complete_upto"]) for source in status["sources"].values()]
        newest_s = max((end for end in ends if end is not None), default=None)
        now_s = now_us() / 1e6
        #: Lag is relative to the clock or, in a replay of old rows, to the newest source.
        replayed = newest_s is not None and abs(now_s - newest_s) > DAY_S
        self._now_s = newest_s if newest_s is not None and replayed else now_s
        self._unhealthy = {part["part"]: part for part in status.get("unhealthy", ())}

    def headline(self) -> str:
        status = self._status
        parts = [status.get("state", "running"), f"deployment {status['deployment']}"]
        if "pid" in status:
            parts.append(f"pid {status['pid']}")
        now = datetime.fromtimestamp(now_us() / 1e6).astimezone()
        parts.append(f"{now:%Y-%m-%d %H:%M:%S %Z}")
        return f"network [bold]{status['network']}[/bold]: {', '.join(parts)}"

    def sources(self) -> Table:
        table = _table("source", "complete up to", ">lag", ">rows", ">late", ">future", ">dead")
        for name, source in self._status["sources"].items():
            counts = ("rows", "late_rows", "future_rows", "dead_letter_rows")
            upto, lag = self._position(source["complete_upto"], ended=source["ended"])
            table.add_row(name, upto, lag, *(str(source[key]) for key in counts))
        return table

    def nodes(self) -> Table:
        nodes = self._status["nodes"]
        several = any(len(node.get("paths", ())) > 1 for node in nodes)
        shared = any(node.get("host", node["node"]) != node["node"] for node in nodes)
        table = _table(
            *(["host"] if shared else []), "node", *(["path"] if several else []), ">pid", "state",
            "results up to", ">lag", "waiting for",
        )  # fmt: skip
        for node in nodes:
            first = [node["host"]] if shared else []
            pid = str(node.get("pid") or "-")
            if not node.get("paths"):
                absent = f"[red]{self._absent(node)}[/red]"
                path_cell = ["-"] if several else []
                table.add_row(*first, node["node"], *path_cell, pid, absent, "-", "-", "-")
            stopped = None
            if node.get("failure"):
                part = self._unhealthy.get(node["node"], {"state": "failed"})
                stopped = f"[red]{part['state']}[/red]"
            for name, path in node.get("paths", {}).items():
                table.add_row(
                    *first, node["node"], *([name] if several else []), pid,
                    stopped or _state(path),
                    *self._position(path["position"], ended=path["ended"]),
                    "-" if stopped or not self._waits(path) else ", ".join(path["waiting_for"]),
                )  # fmt: skip
                if path["tentative_upto"] is not None:
                    upto, lag = self._position(path["tentative_upto"])
                    blank = [""] * (len(first) + 2 + several)
                    table.add_row(*blank, "tentative", upto, lag, "")
        return table

    def outputs(self) -> Table:
        table = _table("output", "client up to", ">lag", ">last delay", ">breaks", "contract")
        for name, contract in self._status["contracts"].items():
            upto, lag = self._position(contract["position"])
            delay = "-" if contract["delay_ms"] is None else _seconds(contract["delay_ms"] / 1_000)
            within = contract["within"]
            promise = f"within {within}: " if within else ""
            color, word = "" if contract["kept"] else "[red]", contract_word(contract)
            if name in self._status.get("stopped", {}):
                color, promise, word = "[red]", "", "STOPPED"
            table.add_row(
                name, upto, lag, delay, str(contract["breaks"]), f"{color}{promise}{escape(word)}"
            )
        return table

    def notices(self) -> Iterator[str]:
        """The problems that need attention, one line each."""
        status = self._status
        for name, source in status["sources"].items():
            if count := source["restamped_rows"]:
                rows = "row was" if count == 1 else "rows were"
                yield (
                    f"[yellow]source {name}: {count} late or future {rows} given a new time "
                    "(late='restamp')[/yellow]"
                )
            if clock := _clock(source["clock_steps"], source["clock_apart_ms"]):
                yield f"[yellow]source {name}: {clock}[/yellow]"
        for host, process in status.get("processes", {}).items():
            if not status["hosts"][host]:
                yield f"host {host}: standby, pid {process['pid']}"
            if process["restarts"]:
                yield f"host {host}: {_times(process['restarts'], 'restart')}"
        for part in status.get("unhealthy", ()):
            yield _unhealthy(part)
        for node in status["nodes"]:
            for name, path in node.get("paths", {}).items():
                if late := _recovery(path.get("footprints")):
                    yield f"[yellow]node {node['node']}, path {escape(name)}: {late}[/yellow]"
        for node, differences in status.get("differs", {}).items():
            for text in differences:
                yield f"[red]node {node}:[/red] {escape(text)}"
        for output, why in status.get("stopped", {}).items():
            reason = escape(why)
            yield f"[bold red]output {output} stopped, no replica is left:[/bold red] {reason}"
        for failure in status["failures"]:
            if failure["node"] not in self._unhealthy:
                yield _failure(failure)
        failed = {failure["node"] for failure in status["failures"]} | {*self._unhealthy}
        for node in status["nodes"]:
            if node.get("failure") and node.get("paths") and node["node"] not in failed:
                yield f"[red]node {node['node']} stopped:[/red] {escape(node['failure'])}"

    def _waits(self, path: dict[str, Any]) -> bool:
        """Whether a path is late because of its inputs. A healthy one only waits for the next
        bucket; one that is catching up has inputs that it has not processed."""
        complete_upto, position = path["all_complete_upto"], path["position"]
        if complete_upto is not None and position is not None and complete_upto > position:
            return False
        end_s = self._end_s(path["position"])
        late_s = max(WAITS_S, 3 * (self._width_us or 0) / 1e6)
        is_late = end_s is None or self._now_s - end_s > late_s
        return bool(path["waiting_for"]) and (path["state"] != "STABLE" or is_late)

    # -- cells ------------------------------------------------------------------------------------

    def _absent(self, node: dict[str, Any]) -> str:
        """Why a node reports no position."""
        for name in (node["node"], node.get("host", "")):
            if name in self._unhealthy:
                return str(self._unhealthy[name]["state"])
        return "no answer" if node.get("failure") else "starting"

    def _end_s(self, bucket: int | None) -> float | None:
        if bucket is None or self._width_us is None:
            return None
        return float((bucket + 1) * self._width_us / 1e6)

    def _position(self, bucket: int | None, *, ended: bool = False) -> tuple[str, str]:
        """The end of a bucket as a time of day, and its lag, which an ended stream has not."""
        end_s = self._end_s(bucket)
        if end_s is None:
            return "-", "-"
        end = datetime.fromtimestamp(end_s).astimezone()
        digits = 1 if (self._width_us or 0) % 100_000 == 0 else 3
        text = f"{end:%H:%M:%S}.{end.microsecond:06d}"[: 9 + digits]
        today = abs(now_us() / 1e6 - end_s) < DAY_S
        lag = "ended" if ended else _seconds(self._now_s - end_s)
        return text if today else f"{end:%Y-%m-%d} {text}", lag


def _table(*columns: str) -> Table:
    """An empty table; a column name that starts with `>` is right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    return table


def _times(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3_600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.0f} h"


def _state(path: dict[str, Any]) -> str:
    color, state = _COLORS.get(path["state"], "yellow"), _STATES.get(path["state"], path["state"])
    if path["state"] == "STABILIZATION" and path["tentative_upto"] is None:
        state = "CATCHING UP"  # after a restart, nothing is corrected
    return f"[{color}]{state}[/{color}]"


def _recovery(footprints: dict[str, Any] | None) -> str:
    """That recovery took, or is predicted to take, longer than stated; empty: nothing to say."""
    if footprints is None or footprints["recovery_ms_stated"] is None:
        return ""
    stated_ms, last_ms = footprints["recovery_ms_stated"], footprints["recovery_ms_last"]
    parts = []
    if last_ms is not None and last_ms > stated_ms:
        parts.append(f"the last recovery took {last_ms / 1_000:.1f} s")
    if footprints["recovery_ms_predicted"] > stated_ms:
        parts.append(f"a recovery now is predicted to take "
                     f"{footprints['recovery_ms_predicted'] / 1_000:.1f} s")  # fmt: skip
    if not parts:
        return ""
    text = f"{', and '.join(parts)}; recovery_time is {stated_ms / 1_000:g} s"
    if (fixed_ms := footprints["recovery_ms_fixed"]) > stated_ms:
        text += f", but {fixed_ms / 1_000:.1f} s are fixed: state a longer time"
    return text


def _clock(steps: int, apart_ms: float) -> str:
    """Steps of the wall clock, and how far the source clock is from it; empty: nothing to say."""
    parts = []
    if steps:
        parts.append(f"the wall clock stepped {_times(steps, 'time')}")
    if abs(apart_ms) > _APART_MS:
        where = "ahead of" if apart_ms > 0 else "behind"
        parts.append(f"the source clock is {abs(apart_ms) / 1_000:.1f} s {where} the wall clock")
    return "; ".join(parts)


def _failure(failure: dict[str, Any]) -> str:
    """The component, the outputs that need it, the error, and what to do."""
    color = "red" if failure["permanent"] else "yellow"
    outcome = "failed" if failure["permanent"] else "cannot continue and retries"
    name = failure["node"] if " " in failure["node"] else f"node {failure['node']}"
    dependents = ", ".join(failure["outputs"])
    needed = f" (needed by {dependents})" if dependents else ""
    text = failure["message"]
    if failure["remedy"]:
        text = f"{text.rstrip('.')}. {failure['remedy']}"
    return f"[{color}]{escape(f'{name} {outcome}{needed}: {text}')}[/{color}]"


def _unhealthy(part: dict[str, Any]) -> str:
    """State of a component, its duration, the next restart, the reason, and what to do."""
    color = "red" if part["out"] else "yellow"
    state = [f"{part['state']} for {part['for_ms'] / 1_000:.0f} s"]
    if part["failures"] > 1:
        state.append(f"{part['failures']} failures in a row")
    if due := due_text(part["state"], part["retry_in_ms"]):
        state.append(due)
    where = f" on {part['host']}" if part["what"] == "node" else ""
    text = escape(f"{part['reason'].rstrip('.')}. Remedy: {part['remedy']}")
    return f"[{color}]{part['what']} {part['part']}{where} {', '.join(state)}[/{color}]: {text}"
