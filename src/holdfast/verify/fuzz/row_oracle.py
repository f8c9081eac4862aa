"""The outputs of a case, row by row in plain Python.

The oracle shares no code with the engine and the audit. It has no buckets, except where a bucket is
part of a definition (`stateful`), and no partial aggregates. Numbers are exact until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.verify.fuzz.case import Case, Node, agg_kind, stream_of
from holdfast.verify.fuzz.expressions import evaluated, holds
from holdfast.verify.fuzz.kinds import rank, same
from holdfast.verify.fuzz.row_aggregates import aggregate

Row = dict[str, Any]


class TooLarge(Exception):
    """A node has more rows than asked for."""


def outputs(case: Case, *, rows_max: int | None = None) -> dict[str, list[Row]]:
    """The rows of every node, in any order."""
    results: dict[str, list[Row]] = {}
    for node in case.nodes:
        results[node.name] = _rows(case, node, [results[up] for up in node.inputs])
        if rows_max is not None and len(results[node.name]) > rows_max:
            raise TooLarge(node.name)
    return results


def _rows(case: Case, node: Node, ups: list[list[Row]]) -> list[Row]:
    if node.kind == "source":
        names = list(node.columns)
        return [dict(zip(names, row, strict=True)) for row in zip(*node.rows.values(), strict=True)]
    stream = stream_of(case, node.inputs[0])
    time, columns = stream.time, stream.columns
    match node.kind:
        case "filter":
            assert node.condition is not None
            return [row for row in ups[0] if holds(node.condition, row) is True]
        case "map":
            return [
                {to: evaluated(of, row) for to, of in node.expressions.items()} for row in ups[0]
            ]
        case "apply":
            return [
                row | {to: evaluated(of, row) for to, of in node.expressions.items()}
                for row in ups[0]
            ]
        case "union":
            return [row for up in ups for row in up]
        case "window" | "window_apply":
            return _windows(node, ups[0], time, columns)
        case "count_window":
            return _count_windows(node, ups[0], time, columns)
        case "join":
            return _join(node, ups[0], ups[1], time, stream_of(case, node.inputs[1]).time)
        case "stateful":
            return _stateful(node, ups[0], time, case.width_us)
    raise AssertionError(node.kind)


def _groups(rows: Iterable[Row], of: Callable[[Row], Any]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(of(row), []).append(row)
    return list(groups.values())


def _key(node: Node, row: Row) -> tuple[Any, ...]:
    return tuple(same(row[key]) for key in node.keys)


def _windows(node: Node, rows: list[Row], time: str, columns: dict[str, str]) -> list[Row]:
    """A row belongs to every window [end - size, end) that contains it; ends are multiples of the
    slide."""
    held = []
    for row in rows:
        end = (row[time] // node.slide + 1) * node.slide
        while end - node.size <= row[time]:
            held.append(row | {"\0end": end})
            end += node.slide
    results = []
    for group in _groups(held, lambda row: (row["\0end"], _key(node, row))):
        end = group[0]["\0end"]
        result = {key: group[0][key] for key in node.keys}
        if node.kind == "window_apply":
            result |= {"rows_in_window": len(group)} if node.function == "counted" else {}
        else:
            result |= _results(node, group, time, columns) | {"window_start": end - node.size}
        results.append(result | {time: end - 1})
    return results


def _results(node: Node, group: list[Row], time: str, columns: dict[str, str]) -> Row:
    return {
        name: aggregate(
            agg,
            [(row[time], row[agg.column] if agg.column else 1) for row in group],
            agg_kind(agg, columns),
        )
        for name, agg in node.aggregates.items()
    }


def _count_windows(node: Node, rows: list[Row], time: str, columns: dict[str, str]) -> list[Row]:
    """Per key, rows in canonical order: by time, then by the columns from left to right."""
    results = []
    for group in _groups(rows, lambda row: _key(node, row)):
        group.sort(key=lambda row: (row[time], *(_canonical(row[name]) for name in columns)))
        for start in range(0, len(group) - node.size + 1, node.slide):
            window = group[start : start + node.size]
            keys = {key: window[0][key] for key in node.keys}
            results.append(keys | _results(node, window, time, columns) | {time: window[-1][time]})
    return results


def _canonical(value: Any) -> tuple[Any, ...]:
    """The canonical order differs from Spark's: NaN precedes all numbers."""
    order = rank(value)
    return (0, 1) if order == (2,) else (0, 0) if order == (0,) else (1, *order)


def _join(node: Node, left: list[Row], right: list[Row], time_l: str, time_r: str) -> list[Row]:
    pairs = {key: key for key in node.keys} or {one: of[1] for one, of in node.expressions.items()}
    dropped = {*node.keys, *({time_l} if time_l == time_r else ())}
    by_key: dict[Any, list[Row]] = {}
    for row in right:
        values = [row[key] for key in pairs.values()]
        if all(value is not None for value in values):
            by_key.setdefault(tuple(map(same, values)), []).append(row)
    results = []
    for row in left:
        values = [row[key] for key in pairs]
        if any(value is None for value in values):
            continue
        for other in by_key.get(tuple(map(same, values)), ()):
            if abs(row[time_l] - other[time_r]) <= node.size:
                later = {time_l: max(row[time_l], other[time_r])}
                further = {name: of for name, of in other.items() if name not in dropped}
                results.append(row | later | further)
    return results


def _stateful(node: Node, rows: list[Row], time: str, width_us: int) -> list[Row]:
    results = []
    for group in _groups(rows, lambda row: _key(node, row)):
        keys = {key: group[0][key] for key in node.keys}
        buckets: dict[int, list[int]] = {}
        for row in group:
            buckets.setdefault(row[time] // width_us, []).append(row[time])
        n = 0
        after = [*sorted(buckets)[1:], None]
        for bucket, following in zip(sorted(buckets), after, strict=True):
            n += len(buckets[bucket])
            last = max(buckets[bucket])
            if node.function == "running":
                results.append(keys | {"n": n, time: last})
            elif following is None or (last + node.size) // width_us < following:
                results.append(keys | {"n": n, time: last + node.size})
                n = 0
    return results
