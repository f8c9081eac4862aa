"""Aggregates as partials that merge in any order and any grouping to the same bits.

Each aggregate has *dimensions* (columns by which partials are grouped, in addition to the keys),
*partials* (columns with a commutative, associative, exact merge) and a *finish* (the result,
computed from merged partials). Sums are exact and rounded once. Variances are computed from an
exact integer and are accurate to the last digit or two (`exact.py`). The results therefore do not
depend on the distribution of rows over tasks, panes or jobs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from holdfast.engine import decimals, exact
from holdfast.engine.determinism import brief, explain
from holdfast.engine.sql import listed, quoted
from holdfast.errors import InputError
from holdfast.model.aggregates import Aggregate

_WHOLE = ("tinyint", "smallint", "int", "bigint")
#: The value of an aggregate function over a single row.
_OF_ONE_ROW = {"count": "if(({}) is null, 0L, 1L)", "sum": "{}", "min": "{}", "max": "{}"}


@dataclass(slots=True)
class _Part:
    """One decomposed aggregate, as SQL over the columns that `prepare` adds."""

    #: Columns computed layer by layer: [{name: sql}, ...]. A layer may use those before it.
    layers: list[dict[str, str]] = field(default_factory=list)
    dims: dict[str, str] = field(default_factory=dict)
    #: By name of the partial: (aggregate function over rows, merge function, sql of the argument).
    partials: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    #: SQL over the partials; with dimensions, SQL over the array of items (structs of dimensions
    #: and partials).
    finish: str = ""
    #: A shorter `finish` for most data, which raises an error for other data.
    short_finish: str = ""
    #: Items with the same dimensions must be merged before the finish (top_k).
    unique_items: bool = False


@dataclass(frozen=True, slots=True)
class AggregatePlan:
    """All aggregates of one operator as SQL text. Each method wraps a SELECT into another one."""

    keys: tuple[str, ...]
    #: Columns, as `sql AS name`, computed layer by layer.
    layers: tuple[tuple[str, ...], ...]
    dims: tuple[str, ...]
    _first: tuple[str, ...]
    _merge: tuple[str, ...]
    #: The partials of a single row. None if an aggregate has no such expression.
    _single: tuple[str, ...] | None
    #: The merge function of each partial, by name.
    merges: Mapping[str, str]
    #: Levels that remove the dimensions: (dimensions that remain grouped, columns).
    _folds: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    _finish: tuple[str, ...]
    #: The plan for data on which this one raises `exact.TOO_WIDE`; the partials are the same.
    general: AggregatePlan | None = None

    def prepare(self, rows: str) -> str:
        for layer in self.layers:
            rows = f"SELECT *, {listed(*layer)} FROM ({rows})"
        return rows

    def first(self, rows: str, **by: str) -> str:
        """Prepared rows to partials, grouped by the SQL in `by`, the keys and the dimensions."""
        named = listed(*(f"{sql} AS {name}" for name, sql in by.items()))
        keys = quoted(*self.keys, *self.dims)
        columns = listed(named, keys, *self._first)
        return f"SELECT {columns} FROM ({rows}) GROUP BY {listed(*by.values(), keys)}"

    def of_each_row(self, rows: str, columns: Sequence[str]) -> str | None:
        """Rows to rows with dimensions and partials of their own. None if there are no expressions
        for them."""
        if self._single is None:
            return None
        chosen = listed(quoted(*columns), quoted(*self.dims), *self._single)
        return f"SELECT {chosen} FROM ({self.prepare(rows)})"

    def merge(self, partials: str, *by: str) -> str:
        """Merge partials to partials with a coarser `by`."""
        return self._grouped(partials, (*by, *self.keys, *self.dims), self._merge)

    def finish(self, partials: str, by: tuple[str, ...], more: tuple[str, ...]) -> str:
        """Partials to results. The input has one row per `by`, keys and dimensions. The output has
        the keys, the results and the columns `more`, which are computed from `by`."""
        for dims, columns in self._folds:
            partials = self._grouped(partials, (*by, *self.keys, *dims), columns)
        chosen = listed(quoted(*self.keys), *self._finish, *more)
        return f"SELECT {chosen} FROM ({partials})"

    def _grouped(self, source: str, by: tuple[str, ...], columns: tuple[str, ...]) -> str:
        keys = quoted(*by)
        return f"SELECT {listed(keys, *columns)} FROM ({source}) GROUP BY {keys}"


def plan(
    df: DataFrame, keys: tuple[str, ...], aggregates: Mapping[str, Any], time: str, of: str
) -> AggregatePlan:
    """Decompose the aggregates. `df` is a stub with the schema of the input."""
    parts: dict[str, _Part] = {}
    finishes: list[tuple[str, str]] = []
    for name, wanted in aggregates.items():
        if name in keys or name in (time, "window_start"):
            raise InputError(f"{of}: the aggregate name {name!r} is taken by a key or time column")
        if callable(wanted) and not isinstance(wanted, Column):
            wanted = wanted()  # a Column cannot be created before Spark runs
        if isinstance(wanted, Aggregate):
            label = f"__a{len(parts)}"
            pieces, text = [(label, wanted)], _placeholder(label)
        elif isinstance(wanted, Column):
            pieces, text = _take_apart(df, wanted, len(parts), f"{of}, aggregate {name!r}")
        else:
            raise InputError(
                f"{of}, aggregate {name!r}: expected hf.sum(...), hf.count(), … or a PySpark "
                f"aggregate Column, found {type(wanted).__name__}"
            )
        for label, aggregate in pieces:
            parts[label] = _part(df, label, aggregate, time, f"{of}, aggregate {name!r}")
        finishes.append((name, text))
    return _assemble(keys, parts, finishes, of)


def _placeholder(label: str) -> str:
    return f"(\x00{label}\x00)"


def _assemble(
    keys: tuple[str, ...], parts: dict[str, _Part], finishes: list[tuple[str, str]], of: str
) -> AggregatePlan:
    layers: list[tuple[str, ...]] = []
    for depth in range(max((len(part.layers) for part in parts.values()), default=0)):
        columns = {
            name: sql
            for part in parts.values()
            for name, sql in (part.layers[depth].items() if depth < len(part.layers) else ())
        }
        if columns:
            layers.append(tuple(f"{sql} AS {name}" for name, sql in columns.items()))
    dims = [name for part in parts.values() for name in part.dims]
    if dims:
        layers.append(
            tuple(f"{sql} AS {name}" for part in parts.values() for name, sql in part.dims.items())
        )
    first, merge, single, merges = [], [], [], {}
    for part in parts.values():
        for name, (fn, merging, sql) in part.partials.items():
            first.append(f"{fn}({sql}) AS {name}")
            merge.append(f"{merging}({name}) AS {name}")
            merges[name] = merging
            if fn in _OF_ONE_ROW:
                single.append(f"{_OF_ONE_ROW[fn].format(sql)} AS {name}")
    unique = [label for label, part in parts.items() if part.unique_items]
    if len(unique) > 1:
        raise InputError(f"{of}: at most one top_k per window; compute others in another window")
    folds: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    others = [label for label, part in parts.items() if part.dims and not part.unique_items]
    if unique and others:
        folds.append((tuple(parts[unique[0]].dims), _fold(parts, others, flatten=())))
        folds.append(((), _fold(parts, unique, flatten=tuple(others))))
    elif dims:
        folds.append(((), _fold(parts, others + unique, flatten=())))
    general = AggregatePlan(
        keys, tuple(layers), tuple(dims), tuple(first), tuple(merge),
        tuple(single) if len(single) == len(first) else None, merges, tuple(folds),
        _results(finishes, {label: part.finish for label, part in parts.items()}),
    )  # fmt: skip
    # Dimensions other than blocks split the items of a sum, which the shorter expression refuses.
    blocks = {f"{label}_ed" for label in parts}
    if not any(part.short_finish for part in parts.values()) or not blocks.issuperset(dims):
        return general
    short = {label: part.short_finish or part.finish for label, part in parts.items()}
    return replace(general, _finish=_results(finishes, short), general=general)


def _results(finishes: list[tuple[str, str]], texts: Mapping[str, str]) -> tuple[str, ...]:
    results = []
    for name, text in finishes:
        for label, sql in texts.items():
            text = text.replace(_placeholder(label), sql)
        results.append(f"{text} AS {quoted(name)}")
    return tuple(results)


def _fold(parts: dict[str, _Part], collect: list[str], flatten: tuple[str, ...]) -> tuple[str, ...]:
    """One level that removes dimensions: aggregates with dimensions become arrays of items."""
    columns = []
    for label, part in parts.items():
        if label in collect:
            fields = ", ".join([*part.dims, *part.partials])
            columns.append(f"array_sort(collect_list(struct({fields}))) AS {label}_i")
        elif label in flatten:
            columns.append(f"array_sort(flatten(collect_list({label}_i))) AS {label}_i")
        else:
            columns += [
                f"{merging}({name}) AS {name}" for name, (_, merging, _sql) in part.partials.items()
            ]
    return tuple(columns)


def _part(df: DataFrame, a: str, aggregate: Aggregate, time: str, of: str) -> _Part:
    if aggregate.kind == "count" and aggregate.arg is None:
        return _Part(partials={f"{a}_n": ("count", "sum", "1")}, finish=f"{a}_n")
    arg = aggregate.arg or "1"
    kind = _type_of(df, arg, of)
    x = f"{a}_x"
    if kind in ("float", "double"):
        # -0.0 and 0.0 compare equal: the result would depend on the order. Adding 0 gives 0.0.
        arg = f"(({arg}) + cast(0 as {kind}))"
    part = _Part(layers=[{x: arg}])
    if aggregate.kind in _DIRECT and kind not in ("float", "double"):
        # The argument is used only once: a plan without the layer is shorter.
        part, x = _Part(), f"({arg})"
    match aggregate.kind:
        case "count":
            part.partials = {f"{a}_n": ("count", "sum", x)}
            part.finish = f"{a}_n"
        case "sum" | "avg":
            _sum(part, a, x, kind, aggregate.kind, of)
        case "min" | "max":
            _orderable(kind, of)
            part.partials = {f"{a}_v": (aggregate.kind, aggregate.kind, x)}
            part.finish = f"{a}_v"
        case "first" | "last":
            _orderable(kind, of)
            fn = "min" if aggregate.kind == "first" else "max"
            part.partials = {f"{a}_v": (fn, fn, f"struct({quoted(time)} as t, {x} as v)")}
            part.finish = f"{a}_v.v"
        case "stddev" | "stddev_pop" | "variance" | "var_pop":
            _spread(part, a, x, kind, aggregate.kind, of)
        case "approx_distinct":
            value = x if kind in ("int", "bigint", "string", "binary") else f"cast({x} as string)"
            lg_k = aggregate.param("lg_k")
            # The estimate of a single sketch depends on the order of its values; that of a union
            # does not.
            part.finish = (
                f"coalesce(hll_sketch_estimate(hll_union({a}_s, {a}_s)), cast(0 as bigint))"
            )
            part.partials = {f"{a}_s": ("hll_sketch_agg", "hll_union_agg", f"{value}, {lg_k}")}
        case "quantile":
            _quantile(part, a, x, kind, aggregate, of)
        case "top_k":
            _orderable(kind, of)
            part.dims = {f"{a}_d": x}
            part.partials = {f"{a}_n": ("count", "sum", x)}
            part.unique_items = True
            part.finish = (
                f"transform(slice(array_sort(transform(filter({a}_i, e -> e.{a}_n > 0), "
                f"e -> struct(-e.{a}_n as m, e.{a}_d as v))), 1, {aggregate.param('k')}), "
                "e -> struct(e.v as value, -e.m as count))"
            )
        case _:
            raise InputError(f"{of}: unknown aggregate {aggregate.kind!r}")
    return part


def _sum(part: _Part, a: str, x: str, kind: str, wanted: str, of: str) -> None:
    whole = kind in _WHOLE or kind.startswith("decimal")
    if not (whole and wanted == "sum"):  # a sum of nulls is null without a count, too
        part.partials = {f"{a}_n": ("count", "sum", x)}
    if kind in _WHOLE:
        part.partials[f"{a}_h"] = ("sum", "sum", f"shiftright(cast({x} as bigint), 32)")
        part.partials[f"{a}_l"] = ("sum", "sum", f"cast({x} as bigint) & 4294967295L")
        high = f"({a}_h + shiftright({a}_l, 32))"
        low = f"({a}_l & 4294967295L)"
        if wanted == "sum":
            # The sum fits a long only if the high half is between -2**31 and 2**31-1.
            part.finish = (
                f"if({high} between -2147483648L and 2147483647L, "
                f"shiftleft({high}, 32) | {low}, cast(null as bigint))"
            )
        else:
            part.finish = (
                f"if({a}_n = 0, null, (cast({high} as double) * 4294967296D + {low}) / {a}_n)"
            )
        return
    if kind.startswith("decimal"):
        precision, scale = (int(text) for text in kind[8:-1].split(","))
        if precision > 28:
            columns = decimals.parts_of(x, scale)
            part.partials |= {f"{a}_h": ("sum", "sum", columns[0]),
                              f"{a}_l": ("sum", "sum", columns[1])}  # fmt: skip
            total = decimals.total_of(f"{a}_h", f"{a}_l", scale)
        else:  # 38 digits are enough for ten billion rows; beyond that, Spark raises an error
            part.partials[f"{a}_d"] = ("sum", "sum", f"cast({x} as decimal(38,{scale}))")
            total = f"{a}_d"
        if wanted == "sum":
            part.finish = f"cast({total} as decimal({min(38, precision + 10)},{scale}))"
        else:
            part.finish = decimals.average_of(total, f"{a}_n", precision, scale)
        return
    _number(kind, of)
    sums = _sums(part, a, _doubles(part, a, x))
    n = _items_n("i", a)
    # Bound to a name, the expression is interpreted; as generated code it would be too long.
    part.finish, part.short_finish = (
        exact.let(
            "i", f"{a}_i", f"if({n} = 0, null, {total}{'' if wanted == 'sum' else f' / {n}'})"
        )
        for total in (
            exact.sum_of_doubles("i", f"{a}_ed", sums),
            exact.short_sum_of_doubles("i", f"{a}_ed", sums),
        )
    )


def _items_n(items: str, a: str) -> str:
    return f"aggregate({items}, 0L, (s, e) -> s + e.{a}_n)"


def _doubles(part: _Part, a: str, x: str) -> list[str]:
    """Add the layers that split the double `x`, and its block as a dimension; return the digits."""
    for depth, layer in enumerate(exact.layers_of_double(x, a), start=len(part.layers)):
        while len(part.layers) <= depth:
            part.layers.append({})
        part.layers[depth].update(layer)
    # The block is a column of an early layer too, so the dimension needs a different name.
    part.dims[f"{a}_ed"] = f"{a}_e"
    return exact.digits_of_double(a)


def _sums(part: _Part, a: str, columns: Sequence[str]) -> list[str]:
    """Add the sums of the columns to the partials; return their names."""
    names = [f"{a}_{place}" for place in range(len(columns))]
    part.partials |= {name: ("sum", "sum", sql) for name, sql in zip(names, columns, strict=True)}
    return names


def _spread(part: _Part, a: str, x: str, kind: str, wanted: str, of: str) -> None:
    part.partials = {f"{a}_n": ("count", "sum", x)}
    if kind in _WHOLE:
        digits = exact.digits_of_whole(x)
    else:
        if not kind.startswith("decimal"):
            _number(kind, of)
        part.layers = [{f"{x}r": part.layers[0][x]}, {x: f"cast({x}r as double)"}]
        digits = _doubles(part, a, x)
    places, products = range(len(digits)), range(2 * len(digits) - 1)
    part.layers.append({f"{a}_g{i}": digits[i] for i in places})
    terms = exact.products_of([f"{a}_g{i}" for i in places])
    part.layers.append({f"{a}_h{i}": terms[i] for i in products})
    sums = _sums(part, f"{a}_s", [f"{a}_g{i}" for i in places])
    squares = _sums(part, f"{a}_q", exact.digits_of_square([f"{a}_h{i}" for i in products]))
    if kind in _WHOLE:
        n, result = f"{a}_n", exact.variance_of_whole(sums, squares, "n", wanted)
    else:
        n = _items_n(f"{a}_i", a)
        result = exact.variance_of_doubles(f"{a}_i", f"{a}_ed", sums, squares, "n", wanted)
    least = 1 if wanted.endswith("pop") else 2
    part.finish = exact.let("n", n, f"if(n < {least}, null, {result})")


_BIN_ZERO, _BIN_INF, _BIN_NAN = 10_000_000, 900_000_000, 1_000_000_000


def _quantile(part: _Part, a: str, x: str, kind: str, aggregate: Aggregate, of: str) -> None:
    if kind not in _WHOLE and not kind.startswith("decimal"):
        _number(kind, of)
    error, q = aggregate.param("error"), aggregate.param("q")
    gamma = (1 + error) / (1 - error)
    value = f"cast({x} as double)"
    size = f"cast(ceil(ln(abs({value})) / ln({gamma!r}D)) as int) + {_BIN_ZERO}"
    part.dims = {
        f"{a}_b": f"case when {x} is null then null when isnan({value}) then {_BIN_NAN} "
        f"when {value} = 0 then 0 when {value} = double('Infinity') then {_BIN_INF} "
        f"when {value} = double('-Infinity') then -{_BIN_INF} "
        f"when {value} > 0 then {size} else -({size}) end"
    }
    part.partials = {f"{a}_n": ("count", "sum", x)}
    items = f"filter({a}_i, e -> e.{a}_b is not null)"
    rank = f"floor({q!r}D * ({_items_n(f'{a}_i', a)} - 1))"
    # The first bin at which the cumulative count exceeds `rank`.
    bin_of_rank = (
        f"aggregate({items}, named_struct('seen', 0L, 'bin', cast(null as int)), (s, e) -> "
        f"named_struct('seen', s.seen + e.{a}_n, 'bin', "
        f"if(s.bin is null and s.seen + e.{a}_n > {rank}, e.{a}_b, s.bin))).bin"
    )
    middle = f"pow({gamma!r}D, abs(b) - {_BIN_ZERO} - 1) * {1 + error!r}D"
    bin_value = f"least({middle}, 1.7976931348623157e308D)"
    part.finish = (
        f"transform(array({bin_of_rank}), b -> case when b is null then null "
        f"when b = {_BIN_NAN} then double('NaN') when b = 0 then 0D "
        f"when b = {_BIN_INF} then double('Infinity') "
        f"when b = -{_BIN_INF} then double('-Infinity') "
        f"when b > 0 then {bin_value} else -{bin_value} end)[0]"
    )


def _type_of(df: DataFrame, sql: str, of: str) -> str:
    from pyspark.errors import PySparkException

    try:
        return str(df.select(F.expr(sql)).schema.fields[0].dataType.simpleString())
    except PySparkException as err:
        columns = ", ".join(df.columns)
        raise InputError(
            f"{of}: {sql!r} cannot be computed from columns {columns} ({brief(err)})"
        ) from None


def _number(kind: str, of: str) -> None:
    if kind not in ("float", "double"):
        raise InputError(f"{of}: {kind} is not a number; cast it or choose another column")


def _orderable(kind: str, of: str) -> None:
    if "map<" in kind:
        raise InputError(f"{of}: values of type {kind} have no order; use another column")


_DIRECT = ("count", "sum", "min", "max", "first", "last")
_PLAIN = {
    "Count": "count", "Sum": "sum", "Min": "min", "Max": "max", "Average": "avg",
    "StddevSamp": "stddev", "StddevPop": "stddev_pop", "VarianceSamp": "variance",
    "VariancePop": "var_pop",
}  # fmt: skip


def _take_apart(
    df: DataFrame, column: Column, at: int, of: str
) -> tuple[list[tuple[str, Aggregate]], str]:
    """Decompose a PySpark aggregate Column into `Aggregate`s and the expression around them."""
    from pyspark.errors import PySparkException

    try:
        analyzed = df.agg(column)._jdf.queryExecution().analyzed()
    except PySparkException as err:
        if err.getCondition() == "MISSING_GROUP_BY":
            raise InputError(
                f"{of}: it uses a column outside an aggregate; aggregate the column, for example "
                "with F.max(...)"
            ) from None
        raise explain(err, of, df.columns) from None
    expressions = analyzed.aggregateExpressions()
    top = expressions.apply(0)
    if top.getClass().getSimpleName() == "Alias":
        top = top.child()
    pieces: list[tuple[str, Aggregate]] = []
    #: What stands for a part of the expression in its SQL text.
    replacements: dict[str, str] = {}

    def walk(node: Any) -> None:
        if node.getClass().getSimpleName() == "AggregateExpression":
            function = node.aggregateFunction()
            name = function.getClass().getSimpleName()
            if name not in _PLAIN or node.isDistinct() or node.filter().isDefined():
                raise InputError(
                    f"{of}: {node.sql()} cannot be merged from partial aggregates; use one of "
                    "hf.count, sum, min, max, avg, stddev, first, last, approx_distinct, quantile, "
                    "top_k, or window(...).apply(fn) for any DataFrame code"
                )
            children = function.children()
            if name == "Count":
                only = str(children.apply(0).sql()) if children.size() == 1 else None
                if only is None:
                    raise InputError(f"{of}: cannot count several columns; count one")
                arg: str | None = None if only == "1" else only
            else:
                arg = str(children.apply(0).sql())
            label = f"__a{at + len(pieces)}"
            pieces.append((label, Aggregate(_PLAIN[name], arg)))
            replacements[str(node.sql())] = _placeholder(label)
            return
        if node.getClass().getSimpleName() == "Literal":
            replacements.setdefault(str(node.sql()), str(node.sql()))
        inner = node.children()
        for index in range(inner.size()):
            walk(inner.apply(index))

    walk(top)
    text = str(top.sql())
    if not pieces:
        raise InputError(f"{of}: {text} is not an aggregate")
    # From left to right: a literal may contain the text of an aggregate.
    longest_first = sorted(replacements, key=len, reverse=True)
    found = re.compile("|".join(re.escape(part) for part in longest_first))
    return pieces, found.sub(lambda match: replacements[match[0]], text)
