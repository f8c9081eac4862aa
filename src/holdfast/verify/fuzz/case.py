"""A random network as plain data: sources with rows, operators, outputs. It can be stored as JSON,
and made smaller by leaving parts out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

from holdfast.verify.fuzz.kinds import TIMESTAMP, WHOLE, digits, is_decimal, is_float

#: An expression: its function and arguments (`expressions`).
Expression = list[Any]


@dataclass(frozen=True, slots=True)
class Agg:
    kind: str
    #: The column; None for `count()` of rows.
    column: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A source or an operator. Which fields have a meaning depends on `kind`."""

    name: str
    #: source, filter, map, apply, union, window, window_apply, count_window, join, stateful
    kind: str
    inputs: list[str] = field(default_factory=list)
    #: source: types by column; the first column is the time.
    columns: dict[str, str] = field(default_factory=dict)
    #: source: values by column.
    rows: dict[str, list[Any]] = field(default_factory=dict)
    #: filter: a condition.
    condition: Expression | None = None
    #: map, apply: expressions by column.
    expressions: dict[str, Expression] = field(default_factory=dict)
    #: Windows and joins: columns; stateful, window_apply: the keys.
    keys: list[str] = field(default_factory=list)
    aggregates: dict[str, Agg] = field(default_factory=dict)
    #: Lengths in microseconds or rows: size and slide of a window, within of a join, gap of timers.
    size: int = 0
    slide: int = 0
    #: stateful, window_apply: the name of the function.
    function: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    width_us: int
    nodes: list[Node]
    #: Names of nodes.
    outputs: list[str]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def sources(self) -> list[Node]:
        return [node for node in self.nodes if node.kind == "source"]

    def to_json(self) -> str:
        return json.dumps(_encoded(asdict(self)), indent=1, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Case:
        data = _decoded(json.loads(text))
        nodes = [
            Node(**{**node, "aggregates": {a: Agg(**of) for a, of in node["aggregates"].items()}})
            for node in data["nodes"]
        ]
        return Case(data["seed"], data["width_us"], nodes, data["outputs"])


@dataclass(frozen=True, slots=True)
class Stream:
    """The columns of a node's results, in order, with their types."""

    columns: dict[str, str]
    time: str


def stream_of(case: Case, name: str) -> Stream:
    node = case.node(name)
    if node.kind == "source":
        return Stream(node.columns, next(iter(node.columns)))
    ups = [stream_of(case, up) for up in node.inputs]
    columns, time = ups[0].columns, ups[0].time
    keys = {key: columns[key] for key in node.keys if key in columns}
    match node.kind:
        case "filter" | "union":
            return ups[0]
        case "map":
            return Stream({to: kind_of(of, columns) for to, of in node.expressions.items()}, time)
        case "apply":
            added = {to: kind_of(of, columns) for to, of in node.expressions.items()}
            return Stream({**columns, **added}, time)
        case "window":
            results = {name: agg_kind(agg, columns) for name, agg in node.aggregates.items()}
            return Stream({**keys, **results, "window_start": TIMESTAMP, time: TIMESTAMP}, time)
        case "count_window":
            results = {name: agg_kind(agg, columns) for name, agg in node.aggregates.items()}
            return Stream({**keys, **results, time: TIMESTAMP}, time)
        case "window_apply":
            counted = {"rows_in_window": "bigint"} if node.function == "counted" else {}
            return Stream({**keys, **counted, time: TIMESTAMP}, time)
        case "join":
            right, time_r = ups[1].columns, ups[1].time
            dropped = {*node.keys, *({time} if time == time_r else ())}
            further = {name: kind for name, kind in right.items() if name not in dropped}
            return Stream({**columns, **further}, time)
        case "stateful":
            return Stream({**keys, "n": "bigint", time: TIMESTAMP}, time)
    raise AssertionError(node.kind)


def kind_of(expression: Expression, columns: dict[str, str]) -> str:
    """The type of an expression."""
    function, column = expression[0], expression[1]
    kind = columns[column]
    match function:
        case "column" | "negative" | "coalesce":
            return kind
        case "modulo":
            return kind if kind == "bigint" else "int"
        case "bigint" | "double" | "string":
            return str(function)
        case "length":
            return "int"
        case "is_null":
            return "boolean"
        case "half":
            return "double"
    raise AssertionError(function)


def agg_kind(agg: Agg, columns: dict[str, str]) -> str:
    """The type of the result of an aggregate."""
    kind = columns[agg.column] if agg.column is not None else ""
    match agg.kind:
        case "count" | "approx_distinct":
            return "bigint"
        case "min" | "max" | "first" | "last":
            return kind
        case "top_k":
            return f"array<struct<value:{kind},count:bigint>>"
        case "sum" if kind in WHOLE:
            return "bigint"
        case "sum" if is_decimal(kind):
            precision, scale = digits(kind)
            return f"decimal({min(38, precision + 10)},{scale})"
        case "avg" if is_decimal(kind):
            precision, scale = digits(kind)
            return f"decimal({min(38, precision + 4)},{min(38, scale + 4)})"
    assert is_float(kind) or kind in WHOLE or is_decimal(kind)
    return "double"


def _encoded(value: Any) -> Any:
    """JSON has no NaN, decimals or bytes: they become an object with one key of a dollar sign."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, bytes):
        return {"$binary": value.hex()}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        return {name: _encoded(item) for name, item in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$decimal" in value:
        return Decimal(value["$decimal"])
    if "$binary" in value:
        return bytes.fromhex(value["$binary"])
    return {name: _decoded(item) for name, item in value.items()}
