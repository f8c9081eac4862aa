"""Well-formedness of a network (ECOC section 2.3), as far as it can be checked without Spark.

1. Every input port is connected exactly once. 2. Every output port is used. 3. Schemas are equal
along an edge (the engine checks the results of user functions, with Spark). 4. Sources and outputs
are never connected directly. 5. Delays are feasible.

Further rules: Every cycle has a `feedback` edge of at least one bucket. Every protected fragment
exists and has a `max_delay` if it needs one (X, Borealis section 2.3). Rows with equal keys are in
the same partition (Flux section 4.1). Each violation names the operator, the port and the remedy.
"""

from __future__ import annotations

from holdfast.config import duration_text
from holdfast.errors import HoldfastError, InputError, NetworkError
from holdfast.model import operators as ops
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema, check_edge_names, check_time


def check(network: Network) -> None:
    violations = [
        *_ports(network),
        *_cycles(network),
        *_used(network),
        *_edges(network),
        *_schemas(network),
        *_delays(network),
        *_protections(network),
        *_patience(network),
        *_partitions(network),
    ]
    if violations:
        raise NetworkError(violations)


def consumers(network: Network) -> dict[str, list[ops.Operator]]:
    """The downstream operators of each operator, by name."""
    downstream: dict[str, list[ops.Operator]] = {op.name: [] for op in network.operators}
    for op in network.operators:
        for upstream in op.inputs:
            if upstream is not None:
                downstream[upstream.name].append(op)
    return downstream


def inputs_of(op: ops.Operator) -> list[ops.Operator]:
    """The upstream operators, by position, without feedback edges and unconnected ports."""
    if isinstance(op, ops.Port) and op.feedback_buckets >= 1:
        return []
    return [upstream for upstream in op.inputs if upstream is not None]


def topological(network: Network) -> list[ops.Operator]:
    """All operators, upstream first; feedback edges are ignored."""
    order: list[ops.Operator] = []
    seen: set[str] = set()

    def visit(op: ops.Operator) -> None:
        if op.name in seen:
            return
        seen.add(op.name)
        for upstream in inputs_of(op):
            visit(upstream)
        order.append(op)

    for op in network.operators:
        visit(op)
    return order


def promised(network: Network) -> dict[str, dict[str, int]]:
    """For each fragment, the `within` in microseconds of the outputs downstream that have one."""
    passed: dict[str, list[str]] = {}
    promises: dict[str, dict[str, int]] = {}
    for op in topological(network):
        if isinstance(op, ops.Source):
            continue
        promises.setdefault(op.fragment, {})
        before = [name for up in inputs_of(op) for name in passed.get(up.name, ())]
        passed[op.name] = list(dict.fromkeys([*before, op.fragment]))
        if isinstance(op, ops.Output) and op.contract.within_us is not None:
            for name in passed[op.name]:
                promises[name][op.name] = op.contract.within_us
    return promises


def _ports(network: Network) -> list[str]:
    violations = []
    if not network.sources:
        violations.append(f"network {network.name!r} has no source: add one with net.source(...)")
    if not network.outputs:
        violations.append(f"network {network.name!r} has no output: add one with net.output(...)")
    for op in network.operators:
        if isinstance(op, ops.Port):
            if not op.feeds:
                violations.append(
                    f"{op.name}, input port 0: no stream feeds it; connect one with "
                    f"net.connect(stream, {op.name})"
                )
            elif len(op.feeds) > 1:
                names = ", ".join(feed.name for feed in op.feeds)
                violations.append(
                    f"{op.name}, input port 0: expected one stream, found {len(op.feeds)} "
                    f"({names}); unite them first with net.union(...)"
                )
    return violations


def _cycles(network: Network) -> list[str]:
    violations: list[str] = []
    state: dict[str, int] = {}

    def visit(op: ops.Operator, trail: list[str]) -> None:
        if state.get(op.name) == 2:
            return
        if state.get(op.name) == 1:
            loop = " -> ".join([*trail[trail.index(op.name) :], op.name])
            violations.append(
                f"{op.name}, input port 0: the cycle {loop} has no delay; connect it with "
                "net.connect(stream, port, feedback=1) or more buckets"
            )
            return
        state[op.name] = 1
        for upstream in inputs_of(op):
            visit(upstream, [*trail, op.name])
        state[op.name] = 2

    for op in network.operators:
        visit(op, [])
    for op in network.operators:
        if isinstance(op, ops.Port) and op.feedback_buckets >= 1:
            violations.append(
                f"{op.name}: feedback edges are checked but cannot run yet, because cyclic "
                "networks need coordinated checkpoints; remove the feedback edge"
            )
    return violations


def _used(network: Network) -> list[str]:
    return [
        f"{op.name}, output port 0: no operator reads it; make it an output with "
        f"net.output('name', stream), or remove it"
        for op in network.operators
        if not isinstance(op, ops.Output) and not consumers(network)[op.name]
    ]


def _edges(network: Network) -> list[str]:
    return [
        f"{op.name}, input port 0: source {op.inputs[0].name} feeds it directly; put an operator "
        "between a source and an output, at least .apply(lambda df: df)"
        for op in network.outputs
        if isinstance(op.inputs[0], ops.Source)
    ]


def _schemas(network: Network) -> list[str]:
    violations = []
    for op in network.operators:
        if isinstance(op, ops.Source | ops.Port):
            try:
                schema = arrow_schema(op.schema)
                check_edge_names(schema.names, of="schema")
                problem = check_time(schema, op.time, of=op.name)
            except HoldfastError as err:
                problem = f"{op.name}: {err}"
            if problem:
                violations.append(problem)
        if isinstance(op, ops.Stateful):
            for label, ddl in (("state", op.state), ("out", op.out)):
                try:
                    schema = arrow_schema(ddl)
                except InputError as err:
                    violations.append(f"{op.name}, {label}: {err}")
                    continue
                if label == "state" and op.timer is not None:
                    problem = check_time(schema, op.timer, of=f"{op.name}, timer", option="timer")
                    if problem:
                        violations.append(problem)
        if isinstance(op, ops.Source) and (problem := _feed_problem(op)):
            violations.append(f"{op.name}, feed: {problem}")
        if isinstance(op, ops.Output) and not (op.sink is None or callable(op.sink)):
            violations.append(
                f"{op.name}, sink: expected a function(table, info) or a sink such as "
                f"hf.ParquetSink('folder'), found {op.sink!r}"
            )
    return violations


def _feed_problem(source: ops.Source) -> str | None:
    feed = source.feed
    if feed is None:
        return None
    if not callable(getattr(feed, "run", None)):
        return (
            "expected hf.Generate(fn), hf.Replay('file') or hf.ReadStream(fn), found "
            f"{type(feed).__name__}; without feed= the application pushes rows itself"
        )
    problem: str | None = getattr(feed, "problem", lambda op: None)(source)
    return problem


def _sources_above(op: ops.Operator) -> list[ops.Source]:
    """The sources upstream of an operator. The network may have cycles."""
    seen, waiting = {op.name: op}, [op]
    while waiting:
        for up in inputs_of(waiting.pop()):
            if up.name not in seen:
                seen[up.name] = up
                waiting.append(up)
    return [source for source in seen.values() if isinstance(source, ops.Source)]


def _delays(network: Network) -> list[str]:
    violations = []
    for op in network.outputs:
        within = op.contract.within_us
        if within is not None and within < network.width_us:
            violations.append(
                f"{op.name}: its contract promises results within {op.contract.within}, but a "
                f"bucket already lasts {duration_text(network.width_us)}; raise `within` to at "
                f"least {duration_text(network.width_us)}, or make the buckets shorter"
            )
            continue
        for source in _sources_above(op):
            closed_us = network.width_us + source.grace_us
            if source.clock == "wall" and within is not None and within < closed_us:
                violations.append(
                    f"{op.name}: its contract promises results within {op.contract.within}, but "
                    f"buckets of {duration_text(network.width_us)} of source {source.name} are "
                    f"closed {duration_text(source.grace_us)} after their end; raise `within` to "
                    f"at least {duration_text(closed_us)}, or give the source a shorter grace="
                )
    return violations


def _protections(network: Network) -> list[str]:
    violations = []
    promises = promised(network)
    for name, protection in network.protections.items():
        if name not in promises:
            names = ", ".join(promises) or "none yet"
            violations.append(
                f"protect({name!r}): no operator runs in this fragment; name another one (the "
                f"fragments are: {names}), or move a stream to it with .on({name!r})"
            )
        elif (
            protection.on_failure != "block" and protection.max_delay is None and not promises[name]
        ):
            violations.append(
                f"protect({name!r}): on_failure={protection.on_failure!r} needs a longest delay, "
                "and no output downstream promises one; give an output a Contract(within='5s'), or "
                "the fragment protect(..., max_delay='2s')"
            )
    return violations


def _patience(network: Network) -> list[str]:
    """`max_delay` must exceed the delays that occur without any failure. The first rows of a bucket
    are one bucket width old when the bucket closes, and inputs do not arrive simultaneously: a
    source with a longer `grace` closes its buckets later."""
    from holdfast.model.fragments import fragments  # import this module
    from holdfast.model.trees import patience

    if _cycles(network) or _ports(network):
        return []
    violations = []
    limits_of, late_us = patience(network), _late_us(network)
    for part in fragments(network):
        name, limits = part.name, limits_of[part.name]
        alpha = network.protection(name).wait_share
        lates_us = [[late_us[stream] for stream in path.inputs] for path in part.paths]
        spread_us = max(max(of) - min(of) for of in lates_us)
        least_us = 3 * network.width_us // 2 + spread_us
        if limits is not None and alpha * limits.own_us < least_us:
            smallest_us = -(-int(1_000 * least_us / alpha) // 1_000_000) * 1_000
            differs = f" and inputs whose `grace` differs by {duration_text(spread_us)}"
            violations.append(
                f"protect({name!r}): its max_delay is {duration_text(limits.own_us)} (max_delay=, "
                f"or its share of `within`), but buckets of {duration_text(network.width_us)}"
                f"{differs if spread_us else ''} need at least {duration_text(smallest_us)}, or "
                "results become tentative without a failure; raise max_delay or `within`, or make "
                "the buckets shorter"
            )
    return violations


def _late_us(network: Network) -> dict[str, int]:
    """Per operator: how long after its end a bucket is closed, because of `grace`."""
    late_us: dict[str, int] = {}
    for op in topological(network):
        upstream = [late_us.get(other.name, 0) for other in op.inputs if other is not None]
        late_us[op.name] = max(upstream, default=0)
        if isinstance(op, ops.Source) and op.clock == "wall":
            late_us[op.name] = op.grace_us
    return late_us


def _partitions(network: Network) -> list[str]:
    violations = []
    split: dict[str, int] = {}
    for op in network.operators:
        if isinstance(op, ops.Exchange):
            partitions = split.setdefault(op.fragment, op.partitions)
            if partitions != op.partitions:
                violations.append(
                    f"{op.name}: fragment {op.fragment!r} is split into {op.partitions} partitions "
                    f"here and into {partitions} elsewhere; use one number"
                )
    if not split:
        return []
    violations += [
        f"fragment {op.fragment!r}: the name is reserved for routing rows into and out of "
        "partitions; choose another name"
        for op in network.operators
        if op.fragment in RESERVED
    ]
    entered: dict[tuple[str, str], ops.Exchange] = {}
    for op in network.operators:
        if isinstance(op, ops.Exchange):
            violations += _entry(op, entered)
    for op in network.operators:
        if op.fragment not in split or isinstance(op, ops.Exchange | ops.Output):
            continue
        for up in inputs_of(op):
            if up.fragment != op.fragment or isinstance(up, ops.Source):
                violations.append(
                    f"{op.name}: {up.name} enters the partitions of fragment {op.fragment!r} "
                    f"without keys that route its rows; use .on({op.fragment!r}, by=..., "
                    f"partitions={split[op.fragment]})"
                )
        violations += _together(op)
    return violations


#: Names of the fragments that `partitions.physical` adds.
RESERVED = ("ingress", "egress")


def _keys_of(op: ops.Operator) -> tuple[str, ...] | None:
    """The key columns of an operator that combines rows; None if it works row by row."""
    match op:
        case ops.TimeWindow() | ops.CountWindow() | ops.Stateful():
            return op.keys
        case ops.Join():
            return op.on if isinstance(op.on, tuple) else ()
        case _:
            return None


def _entry(op: ops.Exchange, entered: dict[tuple[str, str], ops.Exchange]) -> list[str]:
    """Rows enter a partitioned fragment from another fragment, and all entries of a stream use the
    same keys."""
    (up,) = inputs_of(op) or (None,)
    if up is None:
        return []
    if up.fragment == op.fragment and not isinstance(up, ops.Source):
        return [
            f"{op.name}: {up.name} already runs in the partitions of fragment {op.fragment!r}; "
            "remove this .on(...), or give the fragment another name to route the rows again"
        ]
    other = entered.setdefault((up.name, op.fragment), op)
    if sorted(other.keys) != sorted(op.keys):
        return [
            f"{op.name}: {up.name} enters fragment {op.fragment!r} split by {', '.join(op.keys)} "
            f"here and by {', '.join(other.keys)} elsewhere; use two fragments"
        ]
    return []


def _together(op: ops.Operator) -> list[str]:
    """Rows that an operator of a partitioned fragment combines must be in the same partition."""
    keys, routes = _keys_of(op), routes_into(op)
    if keys is None:
        return []
    if len(routes) > 1:
        listed = " and ".join(f"by {', '.join(route)}" for route in sorted(routes))
        return [
            f"{op.name} combines rows that enter fragment {op.fragment!r} split {listed}, so rows "
            "that belong together are in different partitions; use the same by= for all of them"
        ]
    violations = []
    by = {key for route in routes for key in route}
    combined = f"rows by {', '.join(keys)}" if keys else "all rows"
    if not by <= set(keys):
        remedy = "split by some of its keys" if keys else "run it in another fragment"
        violations.append(
            f"{op.name} combines {combined}, but fragment {op.fragment!r} is split by "
            f"{', '.join(sorted(by))}, so rows that belong together are in different "
            f"partitions; {remedy}"
        )
    for up in _above(op):
        if isinstance(up, ops.Stateful):
            violations.append(
                f"{op.name} combines {combined} of {up.name}; the function of {up.name} may change "
                f"{', '.join(sorted(by))}, so rows that belong together may be in different "
                f"partitions; route the results of {up.name} again: .on('other', by=..., "
                "partitions=...)"
            )
    return violations


def _above(op: ops.Operator) -> list[ops.Operator]:
    """The operators upstream of an operator in its fragment, up to the ways into the fragment."""
    above: list[ops.Operator] = []
    waiting = [op]
    while waiting:
        for up in inputs_of(waiting.pop()):
            if up.fragment == op.fragment and not isinstance(up, ops.Source) and up not in above:
                above.append(up)
                if not isinstance(up, ops.Exchange):
                    waiting.append(up)
    return above


def routes_into(op: ops.Operator) -> set[tuple[str, ...]]:
    """The keys of each way into the partitioned fragment on which an operator gets rows."""
    return {tuple(sorted(up.keys)) for up in _above(op) if isinstance(up, ops.Exchange)}


def routed_by(network: Network, op: ops.Operator) -> set[str]:
    """The columns of its input that an operator must not change, because an operator downstream in
    the same partitioned fragment combines rows by them."""
    combining = (other for other in network.operators if _keys_of(other) is not None)
    if not any(op in _above(other) for other in combining):
        return set()
    return {key for route in routes_into(op) for key in route}
