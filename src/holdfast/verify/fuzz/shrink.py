"""Makes a failing case small: leaves out whatever the failure does not need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from holdfast.verify.fuzz import row_oracle
from holdfast.verify.fuzz.case import Case, Node, stream_of
from holdfast.verify.fuzz.program import Layout
from holdfast.verify.fuzz.tester import Failure, Variant, kind_of

#: Says what differs when a case runs in a variant; an empty list if nothing does.
Check = Callable[[Case, Variant], list[str]]


def shrink(failure: Failure, check: Check, *, limit_s: float = 120.0) -> Failure:
    """The smallest case found within `limit_s` that fails in the same way."""
    until = time.monotonic() + limit_s
    progress = True
    while progress:
        progress = False
        for case, variant in _smaller(failure.case, failure.variant):
            if time.monotonic() > until:
                return failure
            if not is_valid(case):
                continue
            found = check(case, variant)
            if found and kind_of(found) == failure.kind:
                failure = Failure(case, variant, found)
                progress = True
                break
    return failure


def is_valid(case: Case) -> bool:
    """Whether the oracle can compute the case: a part that is left out may be needed."""
    if not case.outputs or not any(any(node.rows.values()) for node in case.sources):
        return False
    try:
        rows = row_oracle.outputs(case)
        for node in case.nodes:
            columns = stream_of(case, node.name).columns
            if any(set(row) != set(columns) for row in rows[node.name]):
                return False
    except Exception:  # whatever the parts that were left out cause
        return False
    return True


def _smaller(case: Case, variant: Variant) -> Iterator[tuple[Case, Variant]]:
    """Candidates, the ones that leave out most first."""
    for simple in _simpler(variant):
        yield case, simple
    if len(case.outputs) > 1:
        for name in case.outputs:
            yield _pruned(replace(case, outputs=[name])), variant
    for node in case.nodes:
        if node.kind != "source":
            yield _without(case, node), variant
    for node in case.sources:
        for rows in _fewer(node.rows):
            yield _changed(case, replace(node, rows=rows)), variant
    for node in case.nodes:
        for changed in _simpler_nodes(node):
            yield _pruned(_changed(case, changed)), variant


def _simpler(variant: Variant) -> Iterator[Variant]:
    if variant.layout.fragments:
        yield replace(variant, layout=Layout(variant.layout.shards))
        for name in variant.layout.fragments:
            rest = {to: of for to, of in variant.layout.fragments.items() if to != name}
            yield replace(variant, layout=replace(variant.layout, fragments=rest))
    if variant.layout.shards > 1:
        yield replace(variant, layout=replace(variant.layout, shards=1))
    if len(variant.groups) > 1:
        yield replace(variant, groups=(1,))
        yield replace(variant, groups=variant.groups[:1])
    if variant.jobs != "small":
        yield replace(variant, jobs="small")


def _changed(case: Case, node: Node) -> Case:
    return replace(case, nodes=[node if of.name == node.name else of for of in case.nodes])


def _without(case: Case, gone: Node) -> Case:
    """The case in which the consumers of a node read its first input instead."""

    def renamed(name: str) -> str:
        return gone.inputs[0] if name == gone.name else name

    nodes = [
        replace(node, inputs=list(map(renamed, node.inputs)))
        for node in case.nodes
        if node.name != gone.name
    ]
    outputs = list(dict.fromkeys(map(renamed, case.outputs)))
    sources = {node.name for node in case.sources}
    return _pruned(replace(case, nodes=nodes, outputs=[n for n in outputs if n not in sources]))


def _pruned(case: Case) -> Case:
    """The case without nodes that no output needs."""
    needed: set[str] = set()
    waiting = list(case.outputs)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += case.node(name).inputs
    return replace(case, nodes=[node for node in case.nodes if node.name in needed])


def _fewer(rows: dict[str, list[Any]]) -> Iterator[dict[str, list[Any]]]:
    """Rows without a half, a quarter, an eighth, and for few rows without a single one."""
    count = len(next(iter(rows.values())))
    size = count
    while size > 1:
        size = (size + 1) // 2
        for start in range(0, count, size):
            yield {name: of[:start] + of[start + size :] for name, of in rows.items()}
        if size == 1:
            return


def _simpler_nodes(node: Node) -> Iterator[Node]:
    if len(node.aggregates) > 1:
        for name in node.aggregates:
            rest = {to: of for to, of in node.aggregates.items() if to != name}
            yield replace(node, aggregates=rest)
    if len(node.keys) > 1 or (node.keys and node.kind == "window"):
        for key in node.keys:
            yield replace(node, keys=[of for of in node.keys if of != key])
    if len(node.expressions) > 1:
        for name in node.expressions:
            fewer = {to: of for to, of in node.expressions.items() if to != name}
            yield replace(node, expressions=fewer)
    for name, of in node.expressions.items():
        if of[0] != "column":
            yield replace(node, expressions=node.expressions | {name: ["column", of[1]]})
    if node.condition is not None and node.condition[0] in ("and", "or", "not"):
        for side in node.condition[1:]:
            yield replace(node, condition=side)
    if node.kind in ("window", "window_apply", "count_window") and node.slide != node.size:
        yield replace(node, slide=node.size)
    if node.kind == "source" and len(node.columns) > 1:
        for name in list(node.columns)[1:]:
            columns = {to: kind for to, kind in node.columns.items() if to != name}
            yield replace(node, columns=columns, rows={to: node.rows[to] for to in columns})
