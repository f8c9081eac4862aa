"""The operators of a network: what each needs, keeps and gives. No Spark here, no time.

`convergent` says whether an empty start heals by itself once enough input has passed (`extent_us`);
every recovery path asks it (ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.model.contract import Contract

#: By clock, how long after its end a bucket is closed unless `grace` says otherwise: an application
#: takes a while from stamp to push, and rows of several files or partitions are not in order.
GRACE_US = {"wall": 200_000, "data": 1_000_000, "live": 0, "manual": 0}
IDLE_US = 10_000_000


@dataclass(eq=False, slots=True, kw_only=True)
class Operator:
    #: Unique in the network; given by the user or made from the kind and a number.
    name: str
    #: What feeds each input port, by position; None while a port is not connected.
    inputs: list[Operator | None] = field(default_factory=list)
    #: The part of the network that runs this operator.
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
        """How far back in its inputs a result may reach."""
        return 0


@dataclass(eq=False, slots=True, kw_only=True)
class Source(Operator):
    schema: str
    time: str
    feed: Any = None
    #: What becomes of rows whose bucket is closed, or that are too far ahead: `dead-letter` puts
    #: them aside with their times and the reason, `restamp` moves them to the open bucket.
    late: str = "dead-letter"
    #: Rows further ahead of the source clock than this are put aside before they count.
    ahead_us: int = 60_000_000
    #: A bucket is closed so long after its end, for rows that are late or out of order.
    grace_us: int = 0
    #: With clock `data`: the source clock closes when no row has come for so long; None: never.
    idle_us: int | None = None
    #: Which time closes buckets. `wall`: the system clock; `data`: the rows themselves; `live`: a
    #: feed that follows the system clock; `manual`: `advance()`, whose time need not be real.
    clock: str = "wall"


@dataclass(eq=False, slots=True, kw_only=True)
class Port(Operator):
    """A stream that is declared now and connected later: the only way to draw a cycle."""

    schema: str
    time: str
    #: Delay of the edge that feeds it, in buckets; 0 for an ordinary edge.
    feedback_buckets: int = 0
    #: Everything ever connected here, so that a second connection can be reported.
    feeds: list[Operator] = field(default_factory=list)


@dataclass(eq=False, slots=True, kw_only=True)
class Apply(Operator):
    """Row by row: any DataFrame function without state."""

    fn: Callable[[Any], Any]
    #: The function holds Python UDFs that the user declares deterministic and row by row.
    python_udfs: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class Exchange(Apply):
    """Rows move to a fragment that is split into partitions, each to the one its keys belong to
    (Flux, section 4.1)."""

    keys: tuple[str, ...]
    partitions: int


@dataclass(eq=False, slots=True, kw_only=True)
class Part(Apply):
    """The rows that belong to one partition of the fragment they go to."""

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
    #: Name of the result to what it is: our Aggregate or a PySpark Column.
    aggregates: Mapping[str, Any] = field(default_factory=dict)
    #: Any DataFrame code over the raw rows of one window, instead of aggregates.
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
    #: DDL of the state (with the key columns, if the function wants them) and of the output.
    state: str
    out: str
    #: Timestamp column of the state: the function is also called once that time has passed.
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


def sources_of(op: Operator) -> list[Source]:
    """The sources an operator depends on, each once."""
    if isinstance(op, Source):
        return [op]
    return list(dict.fromkeys(source for up in op.inputs if up for source in sources_of(up)))
