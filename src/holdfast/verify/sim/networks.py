"""The simulated networks: small, and together they cover every shape and every kind of state.

The networks are defined with the public API. Only the functions in them differ: they work on the
rows of the simulator (time, key, value) instead of DataFrames, because the simulated engine is a
plain Python function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from holdfast.model.aggregates import count, sum
from holdfast.model.contract import Contract
from holdfast.model.network import Network, Stream
from holdfast.model.partitions import physical
from holdfast.verify.sim.tables import Row

BUCKET = "500ms"
SCHEMA = "ts timestamp, key long, value long"
TOTALS = "ts timestamp, key long, total long"


def small(rows: Sequence[Row]) -> list[Row]:
    """A row-by-row function that drops some rows."""
    return [(at, key, value) for at, key, value in rows if value % 7]


def totals(
    state: dict[int, int], rows: Sequence[Row], end_us: int
) -> tuple[list[Row], dict[int, int]]:
    """Running number of rows per key, emitted for the keys that changed."""
    after = dict(state)
    for _, key, _ in rows:
        after[key] = after.get(key, 0) + 1
    moved = sorted({key for _, key, _ in rows})
    return [(end_us - 1, key, after[key]) for key in moved], after


#: Number of rows of a window of `batches`, and number of its keys.
BATCH, BATCH_KEYS = 5, 11


def spread(rows: Sequence[Row]) -> list[Row]:
    """More keys: some windows of `batches` stay open for long."""
    return [(at, (value * value) % BATCH_KEYS, value) for at, _, value in rows]


def batches(
    state: dict[int, tuple[int, int]], rows: Sequence[Row], end_us: int
) -> tuple[list[Row], dict[int, tuple[int, int]]]:
    """A count window per key: its sum is emitted and its state removed after `BATCH` rows."""
    after, out = dict(state), []
    for _, key, value in rows:
        n, total = after.pop(key, (0, 0))
        if n + 1 == BATCH:
            out.append((end_us - 1, key, total + value))
        else:
            after[key] = n + 1, total + value
    return out, after


def _sources(net: Network, number: int) -> list[Stream]:
    """Rows arrive up to 400 ms late, and there is no grace period: every second source puts late
    rows among its dead letters, the others restamp them."""
    return [
        net.source(
            f"s{n}", SCHEMA, time="ts", grace="0s", late="restamp" if n % 2 else "dead-letter"
        )
        for n in range(1, number + 1)
    ]


def _windows(stream: Stream, size: str, slide: str) -> Stream:
    return stream.window(size, slide=slide).group_by("key").agg(n=count(), total=sum("value"))


def _totals(stream: Stream) -> Stream:
    return stream.stateful(totals, key="key", state="key long, total long", out=TOTALS)


def _batches(stream: Stream) -> Stream:
    return stream.stateful(batches, key="key", state="key long, n long, total long", out=TOTALS)


def single() -> Network:
    """Two sources and one node with two paths: one convergent, one not."""
    net = Network("single", bucket=BUCKET)
    s1, s2 = _sources(net, 2)
    both = net.union(s1, s2).apply(small)
    net.output("windows", _windows(both, "2s", "1s"), contract=Contract(within="3s"))
    net.output("totals", _totals(s1))
    return net


def chain() -> Network:
    """Two sources and two nodes in a row: the shape of the network in chaos on real processes."""
    net = Network("chain", bucket=BUCKET)
    first = net.union(*(source.on("first") for source in _sources(net, 2))).apply(small)
    second = first.on("second")
    net.output("windows", _windows(second, "1s", "500ms"), contract=Contract(within="3s"))
    net.output("totals", _totals(second))
    return net


def line() -> Network:
    """Three nodes in a row."""
    net = Network("line", bucket=BUCKET)
    (s1,) = _sources(net, 1)
    first = s1.on("first").apply(small)
    second = _windows(first.on("second"), "1500ms", "500ms")
    third = second.on("third").apply(only_counts)
    net.output("counts", third, contract=Contract(within="2s"))
    return net


def only_counts(rows: Sequence[Row]) -> list[Row]:
    return [(at, key, n) for at, key, n, _ in rows]


def diamond() -> Network:
    """One node feeds two nodes, which feed a fourth; a second source joins at the end."""
    net = Network("diamond", bucket=BUCKET)
    s1, s2 = _sources(net, 2)
    top = s1.on("top").apply(small)
    left = top.on("left").apply(even)
    right = _totals(top.on("right"))
    ends = [stream.on("bottom") for stream in (left, right, s2)]
    net.output("bottom", net.union(*ends).apply(small))
    return net


def even(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row[2] % 2 == 0]


def fan() -> Network:
    """A source and a node with two consuming nodes each, and three outputs."""
    net = Network("fan", bucket=BUCKET)
    (s1,) = _sources(net, 1)
    first = s1.on("first").apply(small)
    net.output("sums", _windows(s1.on("left").apply(even), "1s", "500ms"))
    net.output("windows", _windows(first.on("middle"), "1s", "500ms"))
    net.output("totals", _totals(first.on("right")))
    return net


def tree() -> Network:
    """Borealis Figure 6: the union of two streams is joined with a third; a second output reads
    only the union."""
    net = Network("tree", bucket=BUCKET)
    s1, s2, s3 = _sources(net, 3)
    both = net.union(s1.on("upper"), s2.on("upper")).apply(small)
    lower = both.on("lower")
    joined = lower.join(s3.on("lower"), on=["key"], within="100ms")
    net.output("joined", joined, contract=Contract(within="4s"))
    net.output("sums", _windows(lower, "1s", "500ms"), contract=Contract(within="4s"))
    return net


def taps() -> Network:
    """Three streams merged into one and passed through two nodes: the network that Borealis
    measured."""
    net = Network("taps", bucket=BUCKET)
    merged = net.union(*(source.on("first") for source in _sources(net, 3))).apply(small)
    net.output("merged", merged.on("second").apply(even), contract=Contract(within="4s"))
    return net


def pair() -> Network:
    """Two replicas of one node that continue when a source is missing: the shape of the network in
    chaos on real processes."""
    net = Network("pair", bucket=BUCKET)
    both = net.union(*_sources(net, 2)).apply(small)
    net.output("windows", _windows(both, "1s", "500ms"), contract=Contract(within="3s"))
    net.output("totals", _totals(both))
    net.protect(
        "main", replicas=2, on_failure="process", while_correcting="process", max_delay="1500ms"
    )
    return net


def hours() -> Network:
    """Two replicas, with buckets so long that a failure of one hour is simulated quickly."""
    net = Network("hours", bucket="5s")
    both = net.union(*_sources(net, 2)).apply(small)
    net.output("windows", _windows(both, "10s", "5s"), contract=Contract(within="30s"))
    net.protect(
        "main", replicas=2, on_failure="process", while_correcting="process", max_delay="15s"
    )
    return net


def short() -> Network:
    """Buckets shorter than the steps that compute them, so that nodes are never idle."""
    net = Network("short", bucket="20ms")
    both = net.union(*_sources(net, 2)).apply(small)
    net.output("windows", _windows(both, "200ms", "20ms"), contract=Contract(within="3s"))
    return net


def pairs(lower: int, upper: int) -> Network:
    """Flux, section 2.4: keyed state in partitions, repartitioned by key into windows; every
    partition has two replicas."""
    net = Network("pairs", bucket=BUCKET)
    sources = [s.on("lower", by="key", partitions=lower) for s in _sources(net, 2)]
    running = _totals(net.union(*sources).apply(small))
    upper_end = _windows(running.on("upper", by="key", partitions=upper), "1s", "500ms")
    net.output("windows", upper_end, contract=Contract(within="4s"))
    for fragment in ("lower", "upper"):
        net.protect(fragment, replicas=2, replication="pairs")
    return physical(net)


def cec_single() -> Network:
    """Windows that close, and state that never does, on one path; a path without state."""
    net = Network("cec-single", bucket=BUCKET)
    s1, s2 = _sources(net, 2)
    merged = net.union(_batches(s1.apply(spread)), _totals(s2.apply(small)))
    net.output("merged", merged, contract=Contract(within="3s"))
    net.output("rows", s1.apply(even))
    return net


def cec_chain() -> Network:
    """Two nodes in a row, both with state."""
    net = Network("cec-chain", bucket=BUCKET)
    first = _batches(net.union(*(s.on("first") for s in _sources(net, 2))).apply(spread))
    net.output("totals", _totals(first.on("second")), contract=Contract(within="3s"))
    return net


def cec_line() -> Network:
    """Three nodes in a row; the last one has windows of time."""
    net = Network("cec-line", bucket=BUCKET)
    (s1,) = _sources(net, 1)
    first = _totals(s1.on("first"))
    second = _batches(first.on("second").apply(spread))
    net.output("windows", _windows(second.on("third"), "1s", "500ms"))
    return net


def cec_fan() -> Network:
    """A node without state feeds two nodes with state, one of them also with windows of time."""
    net = Network("cec-fan", bucket=BUCKET)
    s1, s2 = _sources(net, 2)
    first = net.union(s1.on("first"), s2.on("first")).apply(small)
    left = first.on("left")
    net.output("batches", _batches(left.apply(spread)))
    net.output("windows", _windows(left, "1s", "500ms"))
    net.output("totals", _totals(first.on("right")), contract=Contract(within="4s"))
    return net


def cec_parts() -> Network:
    """Keyed state in partitions, repartitioned by key."""
    net = Network("cec-parts", bucket=BUCKET)
    sources = [s.on("lower", by="key", partitions=2) for s in _sources(net, 2)]
    lower = _batches(net.union(*sources).apply(small))
    net.output("totals", _totals(lower.on("upper", by="key", partitions=2)))
    return physical(net)


#: Networks of pairs that share hosts: number of hosts, number of standbys.
HOSTS = {f"pairs-hosts-{n}": (n, 1) for n in range(2, 5)}

NETWORKS: dict[str, Callable[[], Network]] = {
    "single": single,
    "chain": chain,
    "line": line,
    "diamond": diamond,
    "fan": fan,
    "tree": tree,
    "taps": taps,
    "pair": pair,
    "hours": hours,
    "short": short,
    "cec-single": cec_single,
    "cec-chain": cec_chain,
    "cec-line": cec_line,
    "cec-fan": cec_fan,
    "cec-parts": cec_parts,
    **{f"pairs-{n}": partial(pairs, n, max(1, 4 - n // 2)) for n in range(1, 9)},
    **{name: partial(pairs, n, max(1, n - 1)) for name, (n, _) in HOSTS.items()},
}
