"""A case as a Python program with the public API, in a layout of fragments, partitions and shards.

The tester runs exactly the program that it prints for a failing case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.engine.sql import quoted
from holdfast.model.network import Network
from holdfast.verify.fuzz import expressions, functions
from holdfast.verify.fuzz.case import Agg, Case, Node, stream_of

_HEAD = f"""\
from functools import partial

from pyspark.sql import functions as F

import holdfast as hf
from {functions.__name__} import counted, distinct, quiet, running
"""
#: Aggregates that are written as PySpark Columns only.
_COLUMNS_ONLY = ("stddev_pop", "variance", "var_pop")


@dataclass(frozen=True, slots=True)
class Fragment:
    """The fragment to which the inputs of a node are moved; with `by` it has partitions."""

    name: str
    by: tuple[str, ...] = ()
    partitions: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    #: Number of shards of keyed state.
    shards: int = 2
    #: By node.
    fragments: Mapping[str, Fragment] = field(default_factory=dict)


def network_of(case: Case, layout: Layout) -> Network:
    names: dict[str, Network] = {}
    exec(compile(program(case, layout), "<random network>", "exec"), names)
    return names["net"]


def program(case: Case, layout: Layout) -> str:
    width = f"{case.width_us // 1_000}ms"
    lines = [_HEAD, f'net = hf.Network("fuzz", bucket="{width}", partitions={layout.shards})']
    for node in case.nodes:
        lines.append(f"{node.name} = {_call(case, node, layout)}")
    lines += [f'net.output("out_{name}", {name})' for name in case.outputs]
    return "\n".join(lines) + "\n"


def _call(case: Case, node: Node, layout: Layout) -> str:
    name = f'name="{node.name}"'
    if node.kind == "source":
        time = next(iter(node.columns))
        return f'net.source("{node.name}", {node.columns!r}, time={time!r}, clock="manual")'
    ups = [_moved(up, layout.fragments.get(node.name)) for up in node.inputs]
    columns = stream_of(case, node.inputs[0]).columns
    first, keys = ups[0], ", ".join(map(repr, node.keys))
    texts = {to: expressions.sql(of, columns) for to, of in node.expressions.items()}
    match node.kind:
        case "filter":
            assert node.condition is not None
            return f"{first}.filter({expressions.condition_sql(node.condition, columns)!r}, {name})"
        case "map":
            return f"{first}.map({name}, **{texts!r})"
        case "apply":
            added = ", ".join(f"{to!r}: F.expr({text!r})" for to, text in texts.items())
            return f"{first}.apply(lambda df: df.withColumns({{{added}}}), {name})"
        case "union":
            return f"net.union({', '.join(ups)}, {name})"
        case "join":
            pairs = [
                f"l.{quoted(left)} = r.{quoted(right[1])}"
                for left, right in node.expressions.items()
            ]
            on = repr(" and ".join(pairs)) if pairs else f"[{keys}]"
            return f"{first}.join({ups[1]}, on={on}, within={_ms(node.size)}, {name})"
        case "window" | "window_apply":
            window = f"{first}.window({_ms(node.size)}, slide={_ms(node.slide)}, {name})"
            if node.kind == "window_apply":
                return f"{window}.apply(partial({node.function}, keys=[{keys}]))"
            grouped = f"{window}.group_by({keys})" if node.keys else window
            return f"{grouped}.agg({_aggregates(node)})"
        case "count_window":
            window = f"{first}.count_window({node.size}, by=[{keys}], slide={node.slide}, {name})"
            return f"{window}.agg({_aggregates(node)})"
        case "stateful":
            time = stream_of(case, node.name).time
            kinds = {key: columns[key] for key in node.keys} | {"n": "bigint"}
            timer = {"due": "timestamp"} if node.function == "quiet" else {}
            gap = f", gap_us={node.size}" if timer else ""
            return (
                f"{first}.stateful(partial({node.function}, keys=[{keys}], time={time!r}{gap}), "
                f"key=[{keys}], state={kinds | timer!r}, out={kinds | {time: 'timestamp'}!r}, "
                f"timer={'due' if timer else None!r}, {name})"
            )
    raise AssertionError(node.kind)


def _moved(up: str, fragment: Fragment | None) -> str:
    if fragment is None:
        return up
    if not fragment.by:
        return f'{up}.on("{fragment.name}")'
    return f'{up}.on("{fragment.name}", by={list(fragment.by)!r}, partitions={fragment.partitions})'


def _aggregates(node: Node) -> str:
    return "**{" + ", ".join(f"{to!r}: {_agg(of)}" for to, of in node.aggregates.items()) + "}"


def _agg(agg: Agg) -> str:
    if agg.column is None:
        return "hf.count()"
    column = repr(quoted(agg.column))
    if agg.params.get("pyspark") or agg.kind in _COLUMNS_ONLY:
        return f"lambda: F.{agg.kind}({column})"
    rest = "".join(f", {name}={value!r}" for name, value in agg.params.items())
    return f"hf.{agg.kind}({column}{rest})"


def _ms(us: int) -> str:
    return f'"{us // 1_000}ms"'
