"""The network: a query written in Python, checked before it runs.

net = hf.Network("netmon", bucket="500ms")
tap = net.source("tap", "ts timestamp, src string, bytes long", time="ts")
top = tap.window("10s", slide="1s").group_by("src").agg(bytes=hf.sum("bytes"))
net.output("top_talkers", top)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.config import RecoveryPolicy, duration_text, duration_us
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.contract import Contract
from holdfast.model.protection import (
    CorrectionPolicy,
    FailurePolicy,
    Protection,
    Reconcile,
    Replication,
)
from holdfast.model.pyspark_names import missing
from holdfast.model.schema import ddl_of

#: DDL text, names and types, an Arrow schema or Spark's StructType (`schema.ddl_of`).
Schema: TypeAlias = str | Mapping[str, str] | Any

#: Most partitions of a fragment. Every partition writes one file per bucket for every partition of
#: the next fragment, so the number of files grows with the square.
PARTITIONS_MAX = 64
_UNPROTECTED = Protection()


class Network:
    """Operators and the streams between them: the unit that is checked, run and audited."""

    def __init__(self, name: str, *, bucket: str = "500ms", partitions: int = 2) -> None:
        if not name.replace("-", "_").isidentifier():
            raise InputError(f"network name {name!r}: use letters, digits, - and _")
        if partitions < 1:
            raise InputError(f"partitions={partitions}: must be at least 1")
        self.name = name
        self.width_us = duration_us(bucket, of="bucket")
        #: Number of shards of keyed state. Must not depend on the machine.
        self.partitions = partitions
        self.operators: list[ops.Operator] = []
        #: The network as written by the user, if this one was derived from it
        #: (`partitions.physical`); else this network itself.
        self.logical: Network = self
        #: Options given to `protect`, by fragment. Use `protection` for lookups with defaults.
        self.protections: dict[str, Protection] = {}

    def __repr__(self) -> str:
        sources = ", ".join(op.name for op in self.sources) or "none"
        outputs = ", ".join(op.name for op in self.outputs) or "none"
        return f"<Network {self.name!r}: sources {sources}; outputs {outputs}>"

    def source(
        self,
        name: str,
        schema: Schema,
        *,
        time: str,
        feed: Any = None,
        late: str = "dead-letter",
        ahead: str = "1min",
        grace: str | None = None,
        idle: str | None = None,
        clock: str | None = None,
    ) -> Stream:
        """Add a source: a stream of rows from outside the network.

        schema: columns as text such as "ts timestamp, x long", a dict of names and types, a
            StructType or an Arrow schema.
        time: name of the timestamp column that places rows in buckets.
        feed: supplies the rows (a generator, a replay, a Structured Streaming query); without a
            feed the application pushes rows.
        clock: which time closes buckets: "wall" (default), "data" (default of `ReadStream`),
            "manual" or "live".
        grace: how long after its end a bucket is closed.
        late: what happens to rows that arrive later than `grace`, or that are further in the
            future than `ahead`: "dead-letter" (default) or "restamp".
        idle: with clock="data", time without rows after which the source clock closes buckets;
            "never" disables this.

        See docs/event-time.md."""
        if late not in ("dead-letter", "restamp"):
            raise InputError(
                f"source {name!r}: late={late!r} is not one of 'dead-letter', 'restamp'"
            )
        clock = clock or getattr(feed, "clock", "wall")
        if clock not in ops.GRACE_US:
            clocks = ", ".join(map(repr, ops.GRACE_US))
            raise InputError(f"source {name!r}: clock={clock!r} is not one of {clocks}")
        if grace is not None and clock not in ("wall", "data"):
            raise InputError(
                f"source {name!r}: grace={grace!r} has no effect with clock={clock!r}, where "
                "advance() closes buckets; remove it"
            )
        if idle is not None and clock != "data":
            raise InputError(
                f"source {name!r}: idle={idle!r} has no effect with clock={clock!r}; only with "
                "clock='data' does a source wait for rows to close a bucket; remove it"
            )
        return self._add(
            ops.Source(
                name=self._name("source", name),
                schema=ddl_of(schema, f"source {name!r}"),
                time=time,
                feed=feed,
                late=late,
                ahead_us=duration_us(ahead, of=f"source {name!r} ahead"),
                grace_us=ops.GRACE_US[clock] if grace is None else ops.grace_us(grace, name),
                idle_us=ops.idle_us(idle, name) if clock == "data" else None,
                clock=clock,
            )
        )

    def union(self, *streams: Stream, name: str | None = None) -> Stream:
        if not streams:
            raise InputError("union: give at least one stream")
        inputs: list[ops.Operator | None] = [self._mine(stream) for stream in streams]
        return self._add(ops.Union(name=self._name("union", name), inputs=inputs))

    def port(self, name: str, schema: Schema, *, time: str) -> Stream:
        """Declare a stream that `connect` feeds later. Cycles need a port."""
        ddl = ddl_of(schema, f"port {name!r}")
        return self._add(
            ops.Port(name=self._name("port", name), schema=ddl, time=time, inputs=[None])
        )

    def connect(self, stream: Stream, port: Stream, *, feedback: int = 0) -> None:
        """Feed `port` from `stream`; `feedback` is the delay of the edge in buckets."""
        op = port.op
        if not isinstance(op, ops.Port):
            raise InputError(f"connect: {op.name!r} is not a port; create one with net.port()")
        op.feeds.append(self._mine(stream))
        op.inputs[0] = stream.op
        op.feedback_buckets = feedback

    def output(
        self, name: str, stream: Stream, *, contract: Contract | None = None, sink: Any = None
    ) -> None:
        source = self._mine(stream)
        self._add(
            ops.Output(
                name=self._name("output", name),
                inputs=[source],
                contract=contract or Contract(),
                sink=sink,
                fragment=source.fragment,
            )
        )

    def protect(
        self,
        fragment: str = "main",
        *,
        replicas: int = 1,
        replication: Replication = "switch",
        on_failure: FailurePolicy = "block",
        while_correcting: CorrectionPolicy = "process",
        max_delay: str | None = None,
        wait_share: float = 0.9,
        reconcile: Reconcile = "checkpoint",
        recovery: RecoveryPolicy | None = None,
        recovery_entries: int | None = None,
        recovery_rows: int | None = None,
        recovery_time: str | None = None,
    ) -> None:
        """Replicate a fragment, and choose what it does while inputs are missing (`Protection`).

        replication: how replicas recover; a lost one of `"pairs"` is rebuilt from its peer.
        on_failure: while an input is missing, give no results (`"block"`), or tentative ones
            after holding every bucket (`"delay"`) or the first (`"process"`) for `max_delay`.
        while_correcting: the same for new buckets while tentative results are corrected.
        max_delay: longest delay the fragment adds; by default derived from `within` downstream.
        recovery: what upstream retains. `"replay"`: what an empty node needs. `"checkpoint"`: what
            the newest checkpoint needs. `"cec"`: the same, with checkpoints frequent enough that
            recovery is predicted to take at most `recovery_time`; or that it replays about
            `recovery_rows` rows at most, and reads about `recovery_entries` entries.
        """
        if fragment in self.protections:
            raise InputError(
                f"protect: fragment {fragment!r} is already protected; put all options in one call"
            )
        self.protections[fragment] = Protection(
            replicas=replicas, replication=replication, on_failure=on_failure,
            while_correcting=while_correcting, max_delay=max_delay, wait_share=wait_share,
            reconcile=reconcile, recovery=recovery, recovery_entries=recovery_entries,
            recovery_rows=recovery_rows, recovery_time=recovery_time,
        )  # fmt: skip

    def protection(self, fragment: str) -> Protection:
        return self.protections.get(fragment, _UNPROTECTED)

    def named(self, name: str) -> ops.Operator:
        for op in self.operators:
            if op.name == name:
                return op
        raise InputError(f"network {self.name!r} has no operator {name!r}")

    @property
    def sources(self) -> list[ops.Source]:
        return [op for op in self.operators if isinstance(op, ops.Source)]

    @property
    def outputs(self) -> list[ops.Output]:
        return [op for op in self.operators if isinstance(op, ops.Output)]

    def check(self) -> None:
        """Raise NetworkError with all violations of well-formedness that need no Spark."""
        from holdfast.model.wellformed import check

        check(self)

    def _add(self, op: ops.Operator) -> Stream:
        if not isinstance(op, ops.Output):
            fragments = [upstream.fragment for upstream in op.inputs if upstream is not None]
            op.fragment = fragments[0] if fragments else op.fragment
        self.operators.append(op)
        return Stream(self, op)

    def _mine(self, stream: Stream) -> ops.Operator:
        if not isinstance(stream, Stream):
            raise InputError(
                f"expected a stream of network {self.name!r}, found {type(stream).__name__}"
                + ("; finish the window with .agg(...) or .apply(fn)" if stream else "")
            )
        if stream.network is not self:
            raise InputError(f"stream {stream.op.name!r} belongs to another network")
        return stream.op

    def _name(self, kind: str, name: str | None) -> str:
        if name is None:
            taken = {op.name for op in self.operators}
            number = len(self.operators)
            while f"{kind}-{number}" in taken:
                number += 1
            return f"{kind}-{number}"
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise InputError(f"{kind} name {name!r}: use letters, digits, - and _")
        if any(op.name == name for op in self.operators):
            raise InputError(f"{kind} {name!r}: the name is already used in network {self.name!r}")
        return name


class Stream:
    """The output of an operator. Every method adds an operator and returns its stream."""

    def __init__(self, network: Network, op: ops.Operator) -> None:
        self.network = network
        self.op = op

    def __repr__(self) -> str:
        return f"<Stream {self.op.name!r} of network {self.network.name!r}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing("Stream", name, type(self)))

    def apply(
        self, fn: Callable[[Any], Any], *, python_udfs: bool = False, name: str | None = None
    ) -> Stream:
        """Apply a DataFrame function that works row by row and leaves the time column unchanged."""
        if not callable(fn):
            raise InputError("apply: give a function from DataFrame to DataFrame")
        return self._then(
            ops.Apply(name=self._named("apply", name), fn=fn, python_udfs=python_udfs)
        )

    def filter(self, condition: Any, *, name: str | None = None) -> Stream:
        """Select the rows for which the condition, SQL text or a Column, is true."""
        return self._then(
            ops.Apply(name=self._named("filter", name), fn=lambda df: df.filter(condition))
        )

    def map(self, *columns: Any, name: str | None = None, **named: Any) -> Stream:
        """Select and compute columns, as SQL text or Columns: `map("ts", kb="bytes / 1024")`."""

        def select(df: Any) -> Any:
            from pyspark.sql import functions as F

            def column(value: Any) -> Any:
                return F.expr(value) if isinstance(value, str) else value

            chosen = [column(value) for value in columns]
            chosen += [column(value).alias(key) for key, value in named.items()]
            return df.select(*chosen)

        return self._then(ops.Apply(name=self._named("map", name), fn=select))

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        return self.network.union(self, *others, name=name)

    def window(self, size: str, *, slide: str | None = None, name: str | None = None) -> Windowed:
        """Time windows, tumbling or (with `slide`) sliding. The time column of a result is the last
        instant of its window."""
        size_us = duration_us(size, of="window size")
        slide_us = size_us if slide is None else duration_us(slide, of="window slide")
        if slide_us > size_us:
            raise InputError(
                f"window: slide {slide!r} is longer than size {size!r}: rows in between are lost"
            )
        return Windowed(self, size_us, slide_us, name)

    def count_window(
        self,
        size: int,
        *,
        by: str | list[str] | tuple[str, ...],
        slide: int | None = None,
        name: str | None = None,
    ) -> CountWindowed:
        """Windows of `size` rows per group of `by`, one every `slide` rows, in canonical order."""
        slide = size if slide is None else slide
        if not 1 <= slide <= size:
            raise InputError(f"count_window: slide={slide} must be from 1 to size={size}")
        return CountWindowed(self, size, slide, _keys(by, "count_window"), name)

    def join(
        self,
        other: Stream,
        *,
        on: str | list[str] | tuple[str, ...],
        within: str,
        name: str | None = None,
    ) -> Stream:
        """Join pairs of rows whose times are at most `within` apart. `on`: a column, or a list of
        columns, that are equal on both sides, or SQL over the aliases l and r such as "l.id =
        r.seller and r.price > 10". A result has the columns of the left side and the further
        columns of the right side. Its time is the later of the two times."""
        is_sql = isinstance(on, str) and not on.isidentifier()
        condition: str | tuple[str, ...] = str(on) if is_sql else _keys(on, "join")
        return self._then(
            ops.Join(
                name=self._named("join", name),
                within_us=duration_us(within, of="join within"),
                on=condition,
            ),
            other,
        )

    def stateful(
        self,
        fn: Callable[[Any, Any, Any], Any],
        *,
        key: str | list[str] | tuple[str, ...],
        state: Schema,
        out: Schema,
        timer: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Keyed state with a user-defined function. `fn(state, rows, info)` is called once for
        every bucket with rows or due timers, with Arrow tables of many keys: the rows in canonical
        order, and the state of the keys with such rows or timers. It returns `(out, state)`, with
        the new state of these keys. The result for a key must not depend on other keys. A state
        without the key columns is passed as a whole, which is slow if it is large."""
        return self._then(
            ops.Stateful(
                name=self._named("stateful", name),
                fn=fn,
                keys=_keys(key, "stateful"),
                state=ddl_of(state, "stateful state"),
                out=ddl_of(out, "stateful out"),
                timer=timer,
            )
        )

    def on(
        self,
        fragment: str,
        *,
        by: str | list[str] | tuple[str, ...] | None = None,
        partitions: int | None = None,
    ) -> Stream:
        """Run the following operators in `fragment`, on a separate node. With `by`, the fragment is
        divided into `partitions`, and rows are routed to partitions by these key columns."""
        moved: ops.Apply
        if by is None and partitions is None:
            moved = ops.Apply(name=self._named("on", None), fn=_same)
        elif by is None or partitions is None:
            raise InputError(f"on({fragment!r}): by= and partitions= belong together; set both")
        elif not isinstance(partitions, int) or not 1 <= partitions <= PARTITIONS_MAX:
            raise InputError(
                f"on({fragment!r}): partitions={partitions}: must be from 1 to {PARTITIONS_MAX}"
            )
        else:
            moved = ops.Exchange(
                name=self._named("on", None), fn=_same, keys=_keys(by, "on"), partitions=partitions
            )
        self._then(moved)
        moved.fragment = fragment
        return Stream(self.network, moved)

    def _then(self, op: ops.Operator, *others: Stream) -> Stream:
        op.inputs = [self.op, *(self.network._mine(other) for other in others)]
        return self.network._add(op)

    def _named(self, kind: str, name: str | None) -> str:
        return self.network._name(kind, name)


class Windowed:
    """A time window whose aggregates are not specified yet."""

    def __init__(
        self,
        stream: Stream,
        size_us: int,
        slide_us: int,
        name: str | None,
        keys: tuple[str, ...] = (),
    ) -> None:
        self._stream, self._size_us, self._slide_us = stream, size_us, slide_us
        self._name, self._keys = name, keys

    def __repr__(self) -> str:
        return f"<window of {duration_text(self._size_us)}; finish it with .agg(...) or .apply(fn)>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing("window", name, type(self)))

    def group_by(self, *keys: str) -> Windowed:
        return Windowed(
            self._stream, self._size_us, self._slide_us, self._name, _keys(keys, "group_by")
        )

    def agg(self, **aggregates: Any) -> Stream:
        """One row per window and group: the keys, the aggregates, `window_start` and the time."""
        if not aggregates:
            raise InputError("agg: name at least one aggregate, such as agg(n=hf.count())")
        return self._op(aggregates=dict(aggregates))

    def apply(self, fn: Callable[[Any], Any]) -> Stream:
        """Apply a DataFrame function to the rows of each window. Holdfast sets the time column."""
        if self._keys:
            raise InputError("window.apply: group inside the function, not with group_by()")
        return self._op(fn=fn)

    def _op(self, **rest: Any) -> Stream:
        return self._stream._then(
            ops.TimeWindow(
                name=self._stream._named("window", self._name),
                size_us=self._size_us,
                slide_us=self._slide_us,
                keys=self._keys,
                **rest,
            )
        )


class CountWindowed:
    """A count window whose aggregates are not specified yet."""

    def __init__(
        self, stream: Stream, size: int, slide: int, keys: tuple[str, ...], name: str | None
    ) -> None:
        self._stream, self._size, self._slide = stream, size, slide
        self._keys, self._name = keys, name

    def __repr__(self) -> str:
        return f"<window of {self._size} rows; finish it with .agg(...)>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing("window", name, type(self)))

    def agg(self, **aggregates: Any) -> Stream:
        """One row per full window: the keys, the aggregates, and the time of its last row."""
        if not aggregates:
            raise InputError("agg: name at least one aggregate, such as agg(n=hf.count())")
        return self._stream._then(
            ops.CountWindow(
                name=self._stream._named("count_window", self._name),
                size=self._size,
                slide=self._slide,
                keys=self._keys,
                aggregates=dict(aggregates),
            )
        )


def _same(df: Any) -> Any:
    return df


def _keys(keys: Any, of: str) -> tuple[str, ...]:
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    if not names or not all(isinstance(key, str) for key in names):
        raise InputError(f"{of}: expected at least one column name, as text")
    return names
