"""Random cases. The same seed gives the same case on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast.verify.fuzz import kinds
from holdfast.verify.fuzz.case import Agg, Case, Expression, Node, Stream, stream_of
from holdfast.verify.fuzz.program import Fragment, Layout
from holdfast.verify.fuzz.row_oracle import TooLarge, outputs

_WIDTHS_MS = (100, 250, 500)
_BASES_US = (0, 1_700_000_000_000_000, -3_000_000_000)
_ODD_NAMES = ("a b", "select", "ключ", "x`y", "Time", "l", "r", "value", "a.b", "e", "_end", "x'")
_SIZES_MS = (50, 100, 250, 300, 500, 700, 1_000, 1_500)
#: Most rows of a node: a join can have more rows than both of its inputs.
_ROWS_MAX = 1_500
_WEIGHTS = {"window": 6, "join": 4, "count_window": 3, "stateful": 3, "filter": 2, "map": 2,
            "union": 2, "apply": 1, "window_apply": 1}  # fmt: skip
_APPROXIMATE = ("approx_distinct", "quantile", "stddev", "stddev_pop", "variance", "var_pop")


def draw(seed: int) -> Case:
    case = _Drawing(seed).case()
    while True:
        try:
            outputs(case, rows_max=_ROWS_MAX)
            return case
        except TooLarge:
            case = replace(case, nodes=[_halved(node) for node in case.nodes])


def draw_layout(rng: random.Random, case: Case) -> Layout:
    """Random fragments; operators with keys get partitions. `check` may refuse the result."""
    fragments = {}
    for number, node in enumerate(case.nodes):
        if node.kind == "source" or rng.random() < 0.6:
            continue
        columns = stream_of(case, node.inputs[0]).columns
        keys = [key for key in node.keys if "map<" not in columns[key]]
        if keys and rng.random() < 0.7:
            by = tuple(rng.sample(keys, rng.randint(1, len(keys))))
            fragments[node.name] = Fragment(f"p{number}", by, rng.randint(1, 4))
        else:
            fragments[node.name] = Fragment(f"f{number}")
    return Layout(shards=rng.randint(1, 4), fragments=fragments)


def _halved(node: Node) -> Node:
    half = {name: values[: (len(values) + 1) // 2] for name, values in node.rows.items()}
    return replace(node, rows=half)


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(f"holdfast {seed}")
        self.width_us = self.rng.choice(_WIDTHS_MS) * 1_000
        self.nodes: list[Node] = []
        #: Nodes whose results other operators may use: approximate results are only outputs.
        self.usable: list[str] = []
        self.names = 0
        self.odd_names = list(_ODD_NAMES)

    def case(self) -> Case:
        base_us = self.rng.choice(_BASES_US)
        for _ in range(self.rng.choice((1, 1, 2, 2, 3))):
            self._source(base_us)
        wanted = len(self.nodes) + self.rng.choice((1, 2, 2, 3, 3, 4, 5))
        for _ in range(30):
            if len(self.nodes) >= wanted:
                break
            (kind,) = self.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
            operators: dict[str, Callable[[], None]] = {
                "window": self._window, "join": self._join, "count_window": self._count_window,
                "stateful": self._stateful, "filter": self._filter, "map": self._map,
                "union": self._union, "apply": self._apply, "window_apply": self._window_apply,
            }  # fmt: skip
            operators[kind]()
        used = {up for node in self.nodes for up in node.inputs}
        for node in [node for node in self.nodes if node.kind == "source"]:
            if node.name not in used:
                self._add("filter", [node.name], condition=self._condition(node.name))
        used = {up for node in self.nodes for up in node.inputs}
        chosen = [
            node.name
            for node in self.nodes
            if node.kind != "source" and (node.name not in used or self.rng.random() < 0.2)
        ]
        return Case(self.seed, self.width_us, self.nodes, chosen)

    # -- parts ----------------------------------------------------------------------------------

    def _stream(self, name: str) -> Stream:
        return stream_of(Case(self.seed, self.width_us, self.nodes, []), name)

    def _add(self, kind: str, inputs: list[str], *, usable: bool = True, **rest: Any) -> str:
        name = f"{kind[0]}{len(self.nodes)}"
        self.nodes.append(Node(name, kind, inputs, **rest))
        if usable:
            self.usable.append(name)
        return name

    def _name(self) -> str:
        """A new column name; some need quotes. Names differ also without regard to case."""
        self.names += 1
        if self.odd_names and self.rng.random() < 0.15:
            return self.odd_names.pop(self.rng.randrange(len(self.odd_names)))
        return f"c{self.names}"

    def _input(self) -> str:
        """A stream; later ones are drawn more often."""
        return self.rng.choices(self.usable, range(1, len(self.usable) + 1))[0]

    def _columns(self, name: str, fits: Callable[[str], bool] = lambda kind: True) -> list[str]:
        """The columns of a stream other than the time that have a fitting type."""
        stream = self._stream(name)
        taken = (stream.time, "window_start")
        return [column for column, kind in stream.columns.items()
                if column not in taken and fits(kind)]  # fmt: skip

    def _keys(self, name: str, most: int, fits: Callable[[str], bool]) -> list[str]:
        columns = self._columns(name, fits)
        return self.rng.sample(columns, min(len(columns), self.rng.randint(1, most)))

    # -- operators ------------------------------------------------------------------------------

    def _source(self, base_us: int) -> None:
        rng = self.rng
        time = "ts" if rng.random() < 0.7 else f"when{len(self.nodes)}"
        columns = {time: kinds.TIMESTAMP}
        columns[self._name()] = rng.choice(kinds.COMMON_KEYS)
        for _ in range(rng.randint(1, 5)):
            columns[self._name()] = rng.choice(kinds.ALL)
        count = rng.choice((1, 10, 40, 80, 120) if not self.nodes else (0, 1, 10, 40, 80, 120))
        buckets = rng.sample(range(14), rng.randint(1, 9))
        at = [base_us + rng.choice(buckets) * self.width_us + rng.choice(
                (0, self.width_us - 1, rng.randrange(0, self.width_us, 10_000),
                 rng.randrange(self.width_us))) for _ in range(count)]  # fmt: skip
        rows: dict[str, list[Any]] = {time: at}
        for column, kind in list(columns.items())[1:]:
            pool = kinds.pool(kind)
            few = rng.sample(pool, rng.randint(1, min(len(pool), 6)))
            rows[column] = [kinds.value(rng, kind, few) for _ in range(count)]
        self._add("source", [], columns=columns, rows=rows)

    def _condition(self, name: str, depth: int = 0) -> Expression:
        rng, stream = self.rng, self._stream(name)
        if depth < 2 and rng.random() < 0.3:
            word = rng.choice(("and", "or", "not"))
            sides = 1 if word == "not" else 2
            return [word, *(self._condition(name, depth + 1) for _ in range(sides))]
        column = rng.choice(list(stream.columns))
        kind = stream.columns[column]
        if kinds.is_nested(kind) or kind not in kinds.ALL or rng.random() < 0.2:
            return ["is_null", column]
        return [rng.choice(("=", "<", ">=")), column, rng.choice(kinds.pool(kind))]

    def _filter(self) -> None:
        up = self._input()
        self._add("filter", [up], condition=self._condition(up))

    def _expression(self, column: str, kind: str) -> Expression:
        rng = self.rng
        choices: list[Expression] = [["column", column]] * 3 + [["is_null", column]]
        if kind in kinds.WHOLE:
            choices += [["modulo", column, 3], ["bigint", column], ["double", column],
                        ["string", column], ["coalesce", column, 1]]  # fmt: skip
        elif kinds.is_float(kind):
            choices += [["negative", column], ["half", column], ["double", column]]
        elif kind == "string":
            choices += [["length", column], ["coalesce", column, "none"]]
        elif kind in kinds.ALL and not kinds.is_nested(kind):
            choices += [["coalesce", column, kinds.pool(kind)[0]]]
        return rng.choice(choices)

    def _map(self) -> None:
        up = self._input()
        stream = self._stream(up)
        others = [name for name in stream.columns if name != stream.time]
        chosen = self.rng.sample(others, self.rng.randint(1, len(others)))
        expressions = {
            (column if self.rng.random() < 0.5 else self._name()): self._expression(
                column, stream.columns[column]
            )
            for column in chosen
        }
        items = [(stream.time, ["column", stream.time]), *expressions.items()]
        self.rng.shuffle(items)
        self._add("map", [up], expressions=dict(items))

    def _apply(self) -> None:
        up = self._input()
        columns = self._columns(up)
        if columns:
            column = self.rng.choice(columns)
            new = self._expression(column, self._stream(up).columns[column])
            self._add("apply", [up], expressions={self._name(): new})

    def _union(self) -> None:
        """Of a stream with a part of itself, or of columns of equal types of two streams."""
        one, other = self._input(), self._input()
        if one == other or self._stream(one).time != self._stream(other).time:
            part = self._add("filter", [one], condition=self._condition(one))
            self._add("union", self.rng.choice(([one, part], [part, one, part])))
            return
        left, right = self._stream(one), self._stream(other)
        free = self._columns(other)
        pairs = []
        for column in self._columns(one):
            equal = [name for name in free if right.columns[name] == left.columns[column]]
            if equal:
                pairs.append((column, equal[0]))
                free.remove(equal[0])
        if pairs:
            new = [self._name() for _ in pairs]
            sides = [
                self._add("map", [up], expressions={left.time: ["column", left.time]} | {
                    to: ["column", pair[side]] for to, pair in zip(new, pairs, strict=True)})
                for side, up in enumerate((one, other))
            ]  # fmt: skip
            self._add("union", sides)

    def _aggregates(self, up: str) -> dict[str, Agg]:
        aggregates: dict[str, Agg] = {}
        for _ in range(self.rng.randint(1, 4)):
            agg = self._aggregate(up)
            if agg is None or (
                agg.kind == "top_k" and "top_k" in [a.kind for a in aggregates.values()]
            ):
                agg = Agg("count")
            aggregates[self._name()] = agg
        return aggregates

    def _aggregate(self, up: str) -> Agg | None:
        rng = self.rng
        kind = rng.choice(("count", "sum", "sum", "avg", "min", "max", "first", "last", "stddev",
                           "stddev_pop", "variance", "var_pop", "approx_distinct", "quantile",
                           "top_k", "rows"))  # fmt: skip
        if kind == "rows":
            return Agg("count")
        numbers = kind in ("sum", "avg", "quantile") or kind in _APPROXIMATE[2:]
        fits = kinds.is_number if numbers else lambda of: not kinds.is_nested(of)
        columns = self._columns(up, fits)
        if not numbers and rng.random() < 0.3:
            times = (self._stream(up).time, "window_start")
            columns = [name for name in self._stream(up).columns if name in times]
        if not columns:
            return None
        params: dict[str, Any] = {}
        if kind == "quantile":
            params = {"q": rng.choice((0.0, 0.5, 0.9, 1.0)), "error": rng.choice((0.01, 0.1))}
        elif kind == "top_k":
            params = {"k": rng.randint(1, 4)}
        elif kind == "approx_distinct":
            params = {"lg_k": rng.choice((4, 12))}
        elif kind in ("count", "sum", "avg", "min", "max", "stddev") and rng.random() < 0.2:
            params = {"pyspark": True}
        return Agg(kind, rng.choice(columns), params)

    def _window(self) -> None:
        up = self._input()
        keys = self._keys(up, 2, lambda kind: True) if self.rng.random() < 0.85 else []
        aggregates = self._aggregates(up)
        size, slide = self._lengths()
        self._add(
            "window", [up], keys=keys, aggregates=aggregates, size=size, slide=slide,
            usable=not any(agg.kind in _APPROXIMATE for agg in aggregates.values()),
        )  # fmt: skip

    def _lengths(self) -> tuple[int, int]:
        size = self.rng.choice(_SIZES_MS) * 1_000
        slides = [ms * 1_000 for ms in _SIZES_MS if size / 15 <= ms * 1_000 <= size]
        return size, size if self.rng.random() < 0.5 else self.rng.choice(slides)

    def _window_apply(self) -> None:
        up = self._input()
        keys = self._keys(up, 2, lambda kind: True)
        if keys:
            size, slide = self._lengths()
            function = self.rng.choice(("counted", "distinct"))
            self._add("window_apply", [up], keys=keys, size=size, slide=slide, function=function)

    def _count_window(self) -> None:
        """Nested columns have no order of their own, so they are left out."""
        up = self._input()
        stream = self._stream(up)
        flat = self._columns(up, lambda kind: not kinds.is_nested(kind))
        if any(kinds.is_nested(kind) for kind in stream.columns.values()):
            if not flat:
                return
            kept = {name: ["column", name] for name in [stream.time, *flat]}
            up = self._add("map", [up], expressions=kept)
        keys = self._keys(up, 2, lambda kind: True)
        if not keys:
            return
        aggregates = self._aggregates(up)
        size = self.rng.randint(1, 6)
        self._add(
            "count_window", [up], keys=keys, aggregates=aggregates, size=size,
            slide=self.rng.randint(1, size),
            usable=not any(agg.kind in _APPROXIMATE for agg in aggregates.values()),
        )  # fmt: skip

    def _join(self) -> None:
        one, other = self._input(), self._input()
        left, right = self._stream(one), self._stream(other)
        pairs: list[tuple[str, str]] = []
        columns = self._columns(one)
        self.rng.shuffle(columns)
        for column in columns:
            fitting = [
                name for name in self._columns(other)
                if _comparable(left.columns[column], right.columns[name])
                and name not in [pair[1] for pair in pairs]
            ]  # fmt: skip
            if fitting and len(pairs) < 2:
                pairs.append((column, self.rng.choice(fitting)))
        if not pairs:
            return
        pairs = pairs[: self.rng.randint(1, 2)]
        by_sql = self.rng.random() < 0.3
        renamed = {right.time: ["column", right.time]}
        if right.time != left.time and right.time in left.columns:
            return
        equal: dict[str, Expression] = {}
        for column, name in pairs:
            to = self._name() if by_sql else column
            renamed[to] = ["column", name]
            equal[column] = ["column", to]
        for name in self._columns(other):
            if name not in [pair[1] for pair in pairs] and self.rng.random() < 0.7:
                renamed[self._name()] = ["column", name]
        side = self._add("map", [other], expressions=renamed)
        within = self.rng.choice((50, 100, 250, 700, 1_000)) * 1_000
        rest: dict[str, Any] = {"expressions": equal} if by_sql else {"keys": list(equal)}
        self._add("join", [one, side], size=within, **rest)

    def _stateful(self) -> None:
        up = self._input()
        keys = self._keys(up, 2, lambda kind: not kinds.is_nested(kind))
        if keys and not {"n", "due", "at"} & set(keys):
            function = self.rng.choice(("running", "quiet"))
            gap = self.width_us * self.rng.randint(1, 4) + self.rng.choice((0, 1, 50_000))
            self._add("stateful", [up], keys=keys, function=function, size=gap)


def _comparable(one: str, other: str) -> bool:
    """Types that Spark compares without losing digits."""
    if kinds.is_decimal(one) and kinds.is_decimal(other):
        (p, s), (q, t) = kinds.digits(one), kinds.digits(other)
        return max(p - s, q - t) + max(s, t) <= 38
    whole, floating = one in kinds.WHOLE, kinds.is_float(one)
    return one == other or (whole and other in kinds.WHOLE) or (floating and kinds.is_float(other))
