"""Report of an audit, as text and as JSON.

For each output, the report gives a verdict, the reliability levels reached (ECOC section 2.5) and
examples of missing, wrong and duplicated rows. For each source, it counts the rows that were
rejected or restamped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from holdfast.model.contract import Contract
from holdfast.model.levels import Levels, evaluate
from holdfast.verify.audit.compare import EXAMPLES, Comparison, Delay, order_breaks

#: `unknown`: the data for a verdict is missing; the report names the missing data.
Verdict = Literal["ok", "failed", "unknown"]
#: Fewer undelivered results are usual when a run is stopped or still runs.
UNDELIVERED_US = 3_000_000
#: The levels of `model.levels` in a few words.
_LEGEND = {
    "LOLE": "every row arrived, and no other",
    "LILO": "LF is the share of rows that arrived, EF the share of wrong and duplicated rows",
    "DEFR": "no delay",
    "LIDE": "longest delay after the time of the row",
    "IASO": "rows of each output in order",
    "IESO": "rows of all outputs in order",
}


@dataclass(frozen=True, slots=True)
class OutputReport:
    name: str
    contract: Contract
    #: Violations of the contract; empty if the contract was met.
    broken: tuple[str, ...] = ()
    #: Why there is no verdict; None if rows were compared.
    unknown: str | None = None
    #: Further information for the user, such as where the audit had to start.
    notes: tuple[str, ...] = ()
    #: First and last compared bucket, both inclusive.
    from_bucket: int | None = None
    upto: int | None = None
    found: Comparison | None = None
    #: Time of the complete buckets after `upto` that the client has not received, in microseconds.
    undelivered_us: int = 0
    #: Number of tentative rows given. They are counted, not compared: stable rows replace them.
    tentative_rows: int = 0

    @property
    def verdict(self) -> Verdict:
        if self.unknown is not None:
            return "unknown"
        return "failed" if self.broken else "ok"

    @property
    def levels(self) -> tuple[str, ...]:
        """The strongest ECOC levels that this output reaches by itself."""
        return () if self.found is None else _levels(self.found.levels, timed=self.found.timed)

    def json(self) -> dict[str, Any]:
        result = self.found
        return {
            "output": self.name,
            "verdict": self.verdict,
            "broken": list(self.broken),
            "unknown": self.unknown,
            "notes": list(self.notes),
            "contract": asdict(self.contract),
            "from_bucket": self.from_bucket,
            "upto": self.upto,
            "undelivered_us": self.undelivered_us,
            "tentative_rows": self.tentative_rows,
            "levels": list(self.levels),
            "rows": None if result is None else {
                "ideal": result.ideal_rows,
                "received": result.received_rows,
                "correct": result.correct,
                "missing": result.missing,
                "wrong": result.wrong,
                "duplicated": result.duplicated,
                "examples": result.examples,
            },
            "loss_factor": None if result is None else result.loss_factor,
            "error_factor": None if result is None else result.error_factor,
            "delay_us": None if result is None else {
                "after_bucket": asdict(result.after_bucket) if result.after_bucket else None,
                "after_row": asdict(result.after_row) if result.after_row else None,
            },
            "order_breaks": [] if result is None else list(result.order_breaks),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceReport:
    name: str
    complete_upto: int | None
    ended: bool
    #: Accepted rows, including restamped rows.
    rows: int = 0
    late_rows: int = 0
    future_rows: int = 0
    null_time_rows: int = 0
    #: Late and future rows that were accepted with another time instead of being rejected.
    restamped_rows: int = 0
    #: Rows currently in the dead letters.
    dead_letters: int = 0

    def not_as_pushed(self) -> list[str]:
        """Describe the rows that the ideal does not contain, or contains at another time."""
        counts = ((self.late_rows, "late"), (self.future_rows, "future"),
                  (self.null_time_rows, "without a time"))  # fmt: skip
        kinds = " and ".join(f"{count} {kind}" for count, kind in counts if count)
        put_aside = sum(count for count, _ in counts) - self.restamped_rows
        notes = []
        if put_aside:
            notes.append(
                f"source {self.name}: {put_aside} rows ({kinds}) were moved to the dead letters "
                "and are not part of the ideal"
            )
        if self.restamped_rows:
            notes.append(
                f"source {self.name}: {self.restamped_rows} rows were restamped; the ideal "
                "contains them at their new times"
            )
        return notes


@dataclass(frozen=True, slots=True)
class Report:
    network: str
    outputs: tuple[OutputReport, ...]
    sources: tuple[SourceReport, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        verdicts = [output.verdict for output in self.outputs]
        if "failed" in verdicts:
            return "failed"
        return "unknown" if "unknown" in verdicts or not verdicts else "ok"

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"

    @property
    def not_as_pushed(self) -> list[str]:
        """Rejected and restamped rows of all sources, which the comparison cannot detect."""
        return [text for source in self.sources for text in source.not_as_pushed()]

    @property
    def headline(self) -> str:
        """The verdict, with the rows that it does not cover."""
        undelivered = [
            f"output {output.name}: the results of the last {_span(output.undelivered_us)} were "
            "not delivered"
            for output in self.outputs
            if output.undelivered_us >= UNDELIVERED_US
        ]
        return "; ".join([self.verdict, *undelivered, *self.not_as_pushed])

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that all outputs reach together, including order between outputs."""
        comparisons = {output.name: output.found for output in self.outputs if output.found}
        if not comparisons:
            return ()
        levels = evaluate({name: comparison.matched for name, comparison in comparisons.items()})
        timed = any(comparison.timed for comparison in comparisons.values())
        inter = ("IESO",) if timed and levels.ieso else ()
        return (*_levels(levels, timed=timed), *inter)

    def json(self) -> dict[str, Any]:
        """Return the report as JSON values; other types become strings."""
        report = {
            "network": self.network,
            "verdict": self.verdict,
            "not_as_pushed": self.not_as_pushed,
            "levels": list(self.levels),
            "outputs": [output.json() for output in self.outputs],
            "sources": [asdict(source) for source in self.sources],
        }
        plain: dict[str, Any] = json.loads(json.dumps(report, default=str))
        return plain

    def _legend(self) -> str:
        """The meaning of the levels in the report."""
        reached = {*self.levels, *(level for output in self.outputs for level in output.levels)}
        names = {level.partition("(")[0] for level in reached}
        return "; ".join(f"{name}: {text}" for name, text in _LEGEND.items() if name in names)

    def text(self) -> str:
        lines = [f"audit of {self.network}: {self.headline}", ""]
        lines += _table(
            ["output", "verdict", "buckets", "ideal", "received", "missing", "wrong", "duplicated",
             "levels"],
            [_output_row(output) for output in self.outputs],
        )  # fmt: skip
        if self.levels:
            lines += ["", f"all outputs together: {' '.join(self.levels)}", self._legend()]
        delays = [row for output in self.outputs for row in _delay_rows(output)]
        if delays:
            lines += ["", *_table(["delay", "since", "p50", "p95", "p99", "max"], delays)]
        if self.sources:
            head = ["source", "rows", "late", "future", "no time", "restamped", "dead letters",
                    "complete up to"]  # fmt: skip
            lines += ["", *_table(head, [_source_row(source) for source in self.sources])]
        for output in self.outputs:
            remarks = [*([output.unknown] if output.unknown else []), *output.broken, *output.notes]
            rows = [
                f"{kind}: {_row(row)}"
                for kind, examples in (output.found.examples if output.found else {}).items()
                for row in examples
            ]
            if remarks or rows:
                lines += ["", f"{output.name}:", *(f"  {text}" for text in [*remarks, *rows])]
        return "\n".join(lines)


def judge(found: Comparison, contract: Contract, *, wall_clock: bool) -> list[str]:
    """Return the violations of the contract."""
    broken = []
    if found.levels.loss_share > contract.loss:
        broken.append(f"{found.missing} of {found.ideal_rows} rows are missing")
    if found.error_factor > contract.error:
        broken.append(
            f"{found.wrong} wrong and {found.duplicated} duplicated rows were received beside "
            f"{found.correct} correct ones"
        )
    if found.order_breaks and contract.order != "none":
        some = ", ".join(str(bucket) for bucket in found.order_breaks[:EXAMPLES])
        broken.append(f"order: rows of {len(found.order_breaks)} buckets came too early ({some})")
    within = contract.within_us
    late_us = found.after_row.max_us if found.after_row is not None else 0
    if within is not None and wall_clock and late_us > within:
        broken.append(
            f"a row arrived {_span(late_us)} after its time; promised within {contract.within}"
        )
    return broken


def inter_order_breaks(outputs: Sequence[OutputReport]) -> tuple[int, ...]:
    """Buckets with rows that arrived too early, over all outputs together."""
    return order_breaks([o.found.matched for o in outputs if o.found and o.found.timed])


def _levels(reached: Levels, *, timed: bool) -> tuple[str, ...]:
    """Return the strongest level in each dimension.

    Delay and order are given only if arrivals were recorded. Delay is also omitted if a row arrived
    before its own time, as under a manual clock.
    """
    loss = f"LILO(LF={reached.loss_factor:.6g}, EF={reached.error_factor:.6g})"
    levels = ["LOLE" if reached.lole else loss]
    if timed and reached.delay_us_max is not None:
        levels.append("DEFR" if reached.defr else f"LIDE({_span(reached.delay_us_max)})")
    if timed and reached.iaso:
        levels.append("IASO")
    return tuple(levels)


def _output_row(output: OutputReport) -> list[str]:
    comparison = output.found
    if comparison is None:
        return [output.name, output.verdict, *["-"] * 7]
    counts = (
        comparison.ideal_rows,
        comparison.received_rows,
        comparison.missing,
        comparison.wrong,
        comparison.duplicated,
    )
    buckets = f"{output.from_bucket}..{output.upto}"
    return [output.name, output.verdict, buckets, *map(str, counts), " ".join(output.levels)]


def _delay_rows(output: OutputReport) -> list[list[str]]:
    def row(since: str, delay: Delay) -> list[str]:
        spans = (delay.p50_us, delay.p95_us, delay.p99_us, delay.max_us)
        return [output.name, since, *(_span(us) for us in spans)]

    comparison = output.found
    if comparison is None or comparison.after_bucket is None or comparison.after_row is None:
        return []
    return [row("end of bucket", comparison.after_bucket), row("time of row", comparison.after_row)]


def _source_row(source: SourceReport) -> list[str]:
    counts = (source.rows, source.late_rows, source.future_rows, source.null_time_rows,
              source.restamped_rows, source.dead_letters)  # fmt: skip
    upto = "-" if source.complete_upto is None else str(source.complete_upto)
    return [source.name, *map(str, counts), upto + (" (ended)" if source.ended else "")]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


def _row(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.items())


def _span(us: int) -> str:
    """`812ms`, `1.25s`, `3.1h`: enough digits to compare by eye."""
    for unit, size in (("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000),
                       ("s", 1_000_000), ("ms", 1_000)):  # fmt: skip
        if abs(us) >= size:
            return f"{us / size:.3g}{unit}"
    return f"{us}us"
