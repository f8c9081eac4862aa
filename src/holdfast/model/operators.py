"""The operators of a network: their inputs, options and state. Independent of Spark and clocks.

An operator is `convergent` if its results become correct after a start with empty state, once
`extent_us` of input has passed. All recovery decisions depend on this property (ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.config import duration_us
from holdfast.errors import InputError
from holdfast.model.contract import Contract

#: Default of `grace`, by clock: how long after its end a bucket is closed. `wall` allows for the
#: time from stamping to pushing a row, `data` for several files or partitions out of order.
GRACE_US = {"wall": 200_000, "data": 1_000_000, "live": 0, "manual": 0}
IDLE_US = 10_000_000


@dataclass(eq=False, slots=True, kw_only=True)
class Operator:
    #: Unique in the network; given by the user or generated from the kind and a number.
    name: str
    #: The upstream operator of each input port, by position; None while a port is not connected.
    inputs: list[Operator | None] = field(default_factory=list)
    #: The fragment that runs this operator.
    fragment: str = "main"

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    @property
    def convergent(self) -> bool:
        return True

    @property
    def stateful(self) -> bool:
        return False

    @property
    def extent_us(self) -> int:
        """Longest time between a result and the input rows that contribute to it."""
        return 0


@dataclass(eq=False, slots=True, kw_only=True)
class Source(Operator):
    schema: str
    time: str
    feed: Any = None
    #: What happens to rows whose bucket is closed, or that are too far in the future.
    #: `dead-letter`: such rows are stored apart, with their times and the reason; `restamp`: such
    #: rows move to the open bucket.
    late: str = "dead-letter"
    #: Rows further ahead of the source clock than this are too far in the future: they are handled
    #: as `late` says and do not advance a `data` clock.
    ahead_us: int = 60_000_000
    #: Time between the end of a bucket and its closing, for rows that are late or out of order.
    grace_us: int = 0
    #: With clock `data`: after this time without rows the source clock closes buckets; None: never.
    idle_us: int | None = None
    #: Which time closes buckets. `wall`: the wall clock; `data`: the rows themselves; `live`: a
    #: feed that follows the wall clock; `manual`: `advance()`, with any time.
    clock: str = "wall"


@dataclass(eq=False, slots=True, kw_only=True)
class Port(Operator):
    """A stream that is declared first and connected later: the only way to define a cycle."""

    schema: str
    time: str
    #: Delay of the edge into this port, in buckets; 0 for an ordinary edge.
    feedback_buckets: int = 0
    #: All operators connected to this port, so that a second connection can be reported.
    feeds: list[Operator] = field(default_factory=list)


@dataclass(eq=False, slots=True, kw_only=True)
class Apply(Operator):
    """A stateless DataFrame function that works row by row."""

    fn: Callable[[Any], Any]
    #: The function contains Python UDFs; the user declares that they are deterministic and work
    #: row by row.
    python_udfs: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class Exchange(Apply):
    """Routes every row to a partition of a partitioned fragment, by the keys of the row (Flux,
    section 4.1)."""

    keys: tuple[str, ...]
    partitions: int


@dataclass(eq=False, slots=True, kw_only=True)
class Part(Apply):
    """The rows of a stream that are routed to one partition of the next fragment."""

    keys: tuple[str, ...]
    number: int
    of: int


@dataclass(eq=False, slots=True, kw_only=True)
class Union(Operator):
    pass


@dataclass(eq=False, slots=True, kw_only=True)
class TimeWindow(Operator):
    size_us: int
    slide_us: int
    keys: tuple[str, ...] = ()
    #: An `Aggregate` or a PySpark Column, by name of the result column.
    aggregates: Mapping[str, Any] = field(default_factory=dict)
    #: A DataFrame function over the rows of one window, instead of aggregates.
    fn: Callable[[Any], Any] | None = None

    @property
    def stateful(self) -> bool:
        return True

    @property
    def extent_us(self) -> int:
        return self.size_us


@dataclass(eq=False, slots=True, kw_only=True)
class Join(Operator):
    within_us: int
    #: Column names equal on both sides, or SQL over the aliases `l` and `r`.
    on: tuple[str, ...] | str

    @property
    def stateful(self) -> bool:
        return True

    @property
    def extent_us(self) -> int:
        return self.within_us


@dataclass(eq=False, slots=True, kw_only=True)
class CountWindow(Operator):
    size: int
    slide: int
    keys: tuple[str, ...]
    aggregates: Mapping[str, Any]

    @property
    def stateful(self) -> bool:
        return True

    @property
    def convergent(self) -> bool:
        return False


@dataclass(eq=False, slots=True, kw_only=True)
class Stateful(Operator):
    fn: Callable[[Any, Any, Any], Any]
    keys: tuple[str, ...]
    #: DDL of the state (with the key columns, if the function needs them) and of the output.
    state: str
    out: str
    #: Timestamp column of the state. The function is also called in the bucket of the earliest one.
    timer: str | None = None

    @property
    def stateful(self) -> bool:
        return True

    @property
    def convergent(self) -> bool:
        return False


@dataclass(eq=False, slots=True, kw_only=True)
class Output(Operator):
    contract: Contract
    sink: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.contract, Contract):
            raise InputError(
                f"output {self.name!r}: expected contract=hf.Contract(within=...), found "
                f"{self.contract!r}"
            )


def sources_of(op: Operator) -> list[Source]:
    """The sources that an operator depends on, without duplicates."""
    if isinstance(op, Source):
        return [op]
    return list(dict.fromkeys(source for up in op.inputs if up for source in sources_of(up)))


def grace_us(grace: str, source: str) -> int:
    return 0 if grace in ("0", "0s", "0ms") else duration_us(grace, of=f"source {source!r} grace")


def idle_us(idle: str | None, source: str) -> int | None:
    if idle == "never":
        return None
    return IDLE_US if idle is None else duration_us(idle, of=f"source {source!r} idle")
