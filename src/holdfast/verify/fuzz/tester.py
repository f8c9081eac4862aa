"""Runs random cases: engine against oracle, and engine against itself in other layouts."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.config import Options
from holdfast.engine.session import Sessions
from holdfast.errors import NetworkError
from holdfast.model.schema import arrow_schema, schema_ddl
from holdfast.runtime.running import Deployment
from holdfast.verify.fuzz import kinds, row_oracle
from holdfast.verify.fuzz.case import Case, Node, Stream, stream_of
from holdfast.verify.fuzz.deployed import run_deployed
from holdfast.verify.fuzz.draw import draw, draw_layout
from holdfast.verify.fuzz.engine_run import Jobs, digests, run_network
from holdfast.verify.fuzz.kinds import rank, same
from holdfast.verify.fuzz.program import Fragment, Layout, network_of, program
from holdfast.verify.fuzz.row_aggregates import Near

#: Of the processes of a deployment.
_OPTIONS = Options(memory="1g", master="local[1]", java_options="-XX:TieredStopAtLevel=1")
#: How the difference of a layout begins that the compiler refuses: Spark knows more than `check`.
_REFUSED = "error: NetworkError"
#: Differing rows that a report shows per output.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a case."""

    layout: Layout = field(default_factory=Layout)
    #: Sizes of the groups of buckets that a step computes, repeated.
    groups: tuple[int, ...] = (1_000_000,)
    pane_buckets: int = 16
    #: Runs all jobs as if they had many rows: as medium ones with code generation, as large ones
    #: with several tasks, too.
    jobs: Jobs = "small"
    #: Runs sources, nodes and clients instead of the engine alone.
    deployment: Deployment | None = None

    def body(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(body: Mapping[str, Any]) -> Variant:
        layout = body["layout"]
        fragments = {
            node: Fragment(of["name"], tuple(of["by"]), of["partitions"])
            for node, of in layout["fragments"].items()
        }
        rest = {name: body[name] for name in ("pane_buckets", "jobs", "deployment")}
        return Variant(Layout(layout["shards"], fragments), tuple(body["groups"]), **rest)

    def __str__(self) -> str:
        fragments = ", ".join(of.name for of in self.layout.fragments.values()) or "none"
        return (
            f"groups of {'+'.join(map(str, self.groups))} buckets, {self.layout.shards} shards, "
            f"fragments {fragments}, {self.jobs} jobs"
            f"{f', deployment {self.deployment}' if self.deployment else ''}"
        )


@dataclass(slots=True)
class Failure:
    case: Case
    variant: Variant
    #: What differs, as text; the first word names the kind of the difference.
    differences: list[str]

    @property
    def kind(self) -> str:
        return kind_of(self.differences)

    def __str__(self) -> str:
        return "\n".join(
            [f"seed {self.case.seed}: {self.variant}", *self.differences,
             program(self.case, self.variant.layout), *_rows_text(self.case)]
        )  # fmt: skip


def kind_of(differences: list[str]) -> str:
    """What failed, without names and numbers: a smaller case must fail in the same way."""
    first = differences[0]
    if not first.startswith("error"):
        return first.split(":")[0]
    return re.sub(r"'[^']*'|\b\w*\d\w*\b", "", first)[:120]


@dataclass(slots=True)
class Summary:
    networks: int = 0
    runs: int = 0
    #: Runs as a deployment of processes.
    deployed: int = 0
    rows: int = 0
    #: Layouts that were refused.
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    #: Networks by operator and type of its keys, with at least one row of input.
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    aggregates: Counter[tuple[str, str]] = field(default_factory=Counter)


def variants(case: Case) -> list[Variant]:
    """One step over everything; random groups in one fragment; random groups in a random layout."""
    rng = random.Random(f"variants {case.seed}")

    def groups() -> tuple[int, ...]:
        return tuple(rng.choice((1, 1, 2, 3, 5, 8)) for _ in range(3))

    jobs: tuple[Jobs, ...] = ("small", "small", "medium", "large", "wide")
    return [
        Variant(),
        Variant(Layout(rng.randint(1, 4)), groups(), rng.choice((1, 2, 16)), rng.choice(jobs)),
        Variant(draw_layout(rng, case), groups(), 16, rng.choice(jobs)),
    ]


def check_seed(
    seed: int, sessions: Sessions, summary: Summary, *, deploy: bool = False
) -> Failure | None:
    """Run all variants of the case of a seed; with `deploy` also as a deployment of processes."""
    case = draw(seed)
    ideal = row_oracle.outputs(case)
    summary.networks += 1
    _cover(case, ideal, summary)
    summary.rows += sum(len(ideal[name]) for name in case.outputs)
    bits: dict[str, tuple[int, str]] = {}
    for variant in [*variants(case), *([_deployed(case)] if deploy else [])]:
        variant, refused = _accepted(case, variant)
        summary.refused += refused
        summary.runs += 1
        summary.deployed += variant.deployment is not None
        found, digest = run(case, variant, sessions, ideal)
        if found and variant.layout.fragments and found[0].startswith(_REFUSED):
            summary.refused += 1
            continue
        if not found and bits and digest != bits:
            found = [_other_bits(digest, bits)]
        bits = bits or digest
        if found:
            failure = Failure(case, variant, found)
            summary.failures.append(failure)
            return failure
    return None


def check(case: Case, variant: Variant, sessions: Sessions) -> list[str]:
    """What differs if a case runs in one variant: from the oracle, or from one step in bits."""
    ideal = row_oracle.outputs(case)
    variant, _ = _accepted(case, variant)
    found, digest = run(case, variant, sessions, ideal)
    if found or variant == Variant():
        return found
    found, bits = run(case, Variant(), sessions, ideal)
    return [_other_bits(digest, bits)] if not found and bits != digest else []


def _other_bits(found: dict[str, tuple[int, str]], wanted: dict[str, tuple[int, str]]) -> str:
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"bits: {', '.join(names)}: equal values, but not the bits of a run in one step"


def run(
    case: Case, variant: Variant, sessions: Sessions, ideal: Mapping[str, list[row_oracle.Row]]
) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """Run one variant: the differences from the oracle, and the digests of the outputs."""
    rows = _tables(case)
    extra_buckets = _reach_us(case) // case.width_us + 3
    try:
        if variant.deployment is not None:
            results = run_deployed(
                program(case, variant.layout), rows, deployment=variant.deployment,
                extra_buckets=extra_buckets, options=_OPTIONS,
            )  # fmt: skip
        else:
            results = run_network(
                network_of(case, variant.layout), rows, sessions, groups=variant.groups,
                extra_buckets=extra_buckets, pane_buckets=variant.pane_buckets,
                jobs=variant.jobs,
            )  # fmt: skip
    except Exception as err:
        return [f"error: {type(err).__name__}: {err}"], {}
    found, tables = [], {}
    for name in case.outputs:
        stream = stream_of(case, name)
        # The client of an output without rows receives no table.
        table = results.get(f"out_{name}", _schema(stream).empty_table())
        found += compare(table, ideal[name], stream, name) + _uncanonical(table, name)
        tables[name] = table
    return found, digests(tables)


def _deployed(case: Case) -> Variant:
    rng = random.Random(f"deployment {case.seed}")
    return Variant(draw_layout(rng, case), deployment="processes")


def _accepted(case: Case, variant: Variant) -> tuple[Variant, int]:
    """The variant, or one without fragments if the network refuses the layout."""
    try:
        network_of(case, variant.layout).check()
    except NetworkError:
        return replace(variant, layout=Layout(variant.layout.shards)), 1
    return variant, 0


def _tables(case: Case) -> dict[str, pa.Table]:
    return {
        node.name: pa.table(
            {name: kinds.arrow_of(node.rows[name], kind) for name, kind in node.columns.items()}
        )
        for node in case.sources
    }


def _reach_us(case: Case) -> int:
    """The longest time from a row to a result that depends on it."""
    reach: dict[str, int] = {}
    for node in case.nodes:
        own = node.size if node.kind not in ("source", "count_window") else 0
        reach[node.name] = own + max((reach[up] for up in node.inputs), default=0)
    return max(reach.values())


def _uncanonical(table: pa.Table, name: str) -> list[str]:
    """Doubles whose bits are not the canonical ones of their value."""
    found = []
    for column, of in zip(table.columns, table.schema, strict=True):
        if pa.types.is_floating(of.type):
            values = column.drop_null().to_numpy()
            zeros = np.signbit(values) & (values == 0)
            nans = np.signbit(values) & np.isnan(values)
            if zeros.any() or nans.any():
                found.append(f"canonical: {name}: {of.name!r} has a negative zero or NaN")
    return found


def compare(table: pa.Table, wanted: list[row_oracle.Row], stream: Stream, name: str) -> list[str]:
    """Differences between the results of the engine and those of the oracle."""
    if not table.schema.equals(_schema(stream)):
        found, expected = schema_ddl(table.schema), schema_ddl(_schema(stream))
        return [f"types: {name}: found {found}; expected {expected}"]
    columns = {column: kinds.plain(table[column]) for column in table.column_names}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    near = {column for row in wanted for column, value in row.items() if isinstance(value, Near)}
    exact = [column for column in stream.columns if column not in near]
    unexpected, missing = _unmatched(rows, wanted, exact, sorted(near))
    return [
        f"{kind}: {name}: {len(rows)} of {len(wanted)} rows, such as {rows[:_SHOWN]}"
        for kind, rows in (("unexpected", unexpected), ("missing", missing))
        if rows
    ]


def _schema(stream: Stream) -> pa.Schema:
    kinds_of = {
        name: arrow_schema(f"x {kind}").field(0).type for name, kind in stream.columns.items()
    }
    return pa.schema(list(kinds_of.items()))


def _unmatched(
    found: list[row_oracle.Row],
    wanted: list[row_oracle.Row],
    exact: Sequence[str],
    near: Sequence[str],
) -> tuple[list[row_oracle.Row], list[row_oracle.Row]]:
    """Rows of one side only. Rows that agree in the exact columns are compared in the order of
    their approximate ones."""
    sides: list[dict[Any, list[row_oracle.Row]]] = []
    for rows in (found, wanted):
        groups: dict[Any, list[row_oracle.Row]] = {}
        for row in rows:
            groups.setdefault(tuple(same(row[column]) for column in exact), []).append(row)
        for group in groups.values():
            group.sort(key=lambda row: [rank(_exact(row[column])) for column in near])
        sides.append(groups)
    unexpected, missing = [], []
    for key in {**sides[0], **sides[1]}:
        ours, theirs = sides[0].get(key, []), sides[1].get(key, [])
        if len(ours) == len(theirs) and all(
            _close(one[column], other[column])
            for one, other in zip(ours, theirs, strict=True)
            for column in near
        ):
            continue
        unexpected += ours[len(theirs) :] if len(ours) > len(theirs) else ours
        missing += theirs[len(ours) :] if len(theirs) > len(ours) else theirs
    return unexpected, missing


def _exact(value: Any) -> Any:
    return value.exact if isinstance(value, Near) else value


def _close(found: Any, wanted: Any) -> bool:
    exact = _exact(wanted)
    if found is None or exact is None:
        return found is exact
    if not isinstance(wanted, Near) or not math.isfinite(found):
        return bool(same(found) == same(exact))
    return bool(abs(found - exact) <= wanted.allowed)


def _cover(case: Case, ideal: Mapping[str, Iterable[row_oracle.Row]], summary: Summary) -> None:
    for node in case.nodes:
        if node.kind == "source" or not all(ideal[up] for up in node.inputs):
            continue
        columns = stream_of(case, node.inputs[0]).columns
        for kind in {kinds.label(columns[key]) for key in _keys(node)} or {"none"}:
            summary.coverage[node.kind, kind] += 1
        for agg in node.aggregates.values():
            kind = kinds.label(columns[agg.column]) if agg.column else "rows"
            summary.aggregates[agg.kind, kind] += 1


def _keys(node: Node) -> list[str]:
    return [*node.keys, *(node.expressions if node.kind == "join" else ())]


def _rows_text(case: Case) -> list[str]:
    lines = []
    for node in case.sources:
        count = len(next(iter(node.rows.values())))
        lines.append(f"# rows of {node.name}: {count}")
        if count <= 20:
            names = list(node.columns)
            lines += [
                f"#   {dict(zip(names, map(_text, row), strict=True))}"
                for row in zip(*node.rows.values(), strict=True)
            ]
    return lines


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Decimal) else value
