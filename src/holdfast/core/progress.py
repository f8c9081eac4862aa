"""A node's decisions: which buckets to run, what to keep, what to tell upstream. Pure.

Events in, actions out; the shell performs the actions in order. Per path: wait for whole buckets
(`SUnion`, policy `block`), run them in groups, append the results, checkpoint every n buckets, and
say upstream up to which bucket input was *received* and up to which it is *no longer needed*. Only
the second position lets anybody delete (ARCHITECTURE.md).

What is no longer needed depends on what must be survived:
`replay`      an empty node can rebuild its state and every output its readers lack, so inputs are
              kept for the reach of the windows before the slowest reader, and from the first
              bucket on where an operator is not convergent;
`checkpoint`  the newest durable state version suffices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from holdfast.core.sunion import FOREVER, SUnion
from holdfast.errors import ProtocolViolation

# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputOpened:
    """An input's log was seen: what it holds is known."""

    at: int
    stream: str
    starts_at: int
    trimmed_upto: int


@dataclass(frozen=True, slots=True)
class BoundaryArrived:
    at: int
    stream: str
    upto: int
    #: Rows of each bucket with rows since the boundary before.
    rows: tuple[tuple[int, int], ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class StepDone:
    """Buckets up to `hi` are logged; the version refers to inputs from `needs_from`."""

    at: int
    path: str
    hi: int
    needs_from: int
    #: Without further input something may still come out up to this bucket.
    horizon: int


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    at: int
    path: str
    bucket: int
    needs_from: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """All readers of an output have received it up to this bucket."""

    at: int
    output: str
    received: int


Event = InputOpened | BoundaryArrived | StepDone | CheckpointDone | Acknowledged

# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a path with the state after `bucket`; results before `valid_from` are not to be given
    to anybody, because the inputs they need are gone."""

    path: str
    bucket: int
    origin: int
    valid_from: int


@dataclass(frozen=True, slots=True)
class Run:
    path: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: str
    bucket: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    stream: str
    received: int
    no_longer_needed: int


@dataclass(frozen=True, slots=True)
class End:
    """Every input has ended and everything that could come out has."""

    path: str


@dataclass(frozen=True, slots=True)
class Fail:
    path: str
    why: str


Action = Start | Run | Checkpoint | Acknowledge | End | Fail


@dataclass(frozen=True, slots=True)
class PathPlan:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convergent: bool
    #: Reach of the windows and joins back into the inputs, in whole buckets.
    extent: int


@dataclass(slots=True)
class _PathState:
    plan: PathPlan
    sunion: SUnion
    #: Recovered position, when there was a durable version.
    resumed: tuple[int, int] | None
    origins: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Last bucket computed and logged; None before Start.
    position: int | None = None
    #: A Run that is under way goes up to here.
    running_upto: int | None = None
    #: First bucket the current version refers to, and the newest durable one.
    needs_from: int = 0
    durable: tuple[int, int] | None = None
    #: Rows of buckets that wait, oldest first.
    waiting: list[tuple[int, int]] = field(default_factory=list)
    horizon: int = 0
    #: Greatest boundary of any input.
    ended_upto: int | None = None
    ended: bool = False
    origin: int = 0


class Progress:
    """The state machine of one node."""

    def __init__(
        self,
        paths: Iterable[PathPlan],
        *,
        resumed: dict[str, tuple[int, int]] | None = None,
        recovery: str = "replay",
        checkpoint_buckets: int = 100,
        group_buckets_max: int = 256,
        group_rows_max: int = 2_000_000,
    ) -> None:
        self.recovery = recovery
        self.checkpoint_buckets = checkpoint_buckets
        self.group_buckets_max, self.group_rows_max = group_buckets_max, group_rows_max
        known = resumed or {}
        self.paths = {
            plan.name: _PathState(plan, SUnion(plan.inputs), known.get(plan.name)) for plan in paths
        }
        self.received: dict[str, int] = {}
        self._told: dict[str, tuple[int, int]] = {}
        self._delivered: dict[str, int] = {}

    def handle(self, event: Event) -> list[Action]:
        match event:
            case InputOpened():
                return self._opened(event)
            case BoundaryArrived():
                return self._boundary(event)
            case StepDone():
                return self._done(event)
            case CheckpointDone():
                path = self.paths[event.path]
                path.durable = (event.bucket, event.needs_from)
                return self._acknowledge(path)
            case Acknowledged():
                self._delivered[event.output] = max(
                    event.received, self._delivered.get(event.output, event.received)
                )
                # Said upstream with the next step; after the last one there is none.
                return [
                    action
                    for path in self.paths.values()
                    if event.output in path.plan.outputs and path.ended
                    for action in self._acknowledge(path)
                ]
            case _:
                assert_never(event)

    # -- one method per event ---------------------------------------------------------------------

    def _opened(self, event: InputOpened) -> list[Action]:
        actions: list[Action] = []
        for path in self._reading(event.stream):
            path.origins.setdefault(event.stream, (event.starts_at, event.trimmed_upto))
            if path.position is None and len(path.origins) == len(path.plan.inputs):
                actions += self._start(path)
        return actions

    def _start(self, path: _PathState) -> list[Action]:
        plan = path.plan
        path.origin = min(starts for starts, _ in path.origins.values())
        gone = [trimmed for starts, trimmed in path.origins.values() if trimmed >= starts]
        if path.resumed is not None:
            bucket, path.needs_from = path.resumed
            path.durable = path.resumed
            valid_from = path.origin
        elif not gone:
            bucket, valid_from = path.origin - 1, path.origin
            path.needs_from = path.origin
        elif plan.convergent:
            bucket = max(gone)
            valid_from = bucket + 1 + plan.extent
            path.needs_from = bucket + 1
        else:
            return [
                Fail(
                    plan.name,
                    f"path {plan.name!r} keeps state that an empty start cannot rebuild, inputs up "
                    f"to bucket {max(gone)} are gone, and there is no checkpoint; run with "
                    "recovery='replay' to survive the loss of a node's storage",
                )
            ]
        path.position = bucket
        path.horizon = bucket
        return [Start(plan.name, bucket, path.origin, valid_from), *self._next(path)]

    def _boundary(self, event: BoundaryArrived) -> list[Action]:
        actions: list[Action] = []
        self.received[event.stream] = max(event.upto, self.received.get(event.stream, event.upto))
        for path in self._reading(event.stream):
            path.sunion.boundary(event.stream, FOREVER if event.ended else event.upto)
            path.waiting = sorted([*path.waiting, *event.rows])
            known = path.ended_upto
            path.ended_upto = event.upto if known is None else max(known, event.upto)
            if path.position is not None:
                actions += self._next(path)
        return actions

    def _done(self, event: StepDone) -> list[Action]:
        path = self.paths[event.path]
        if path.running_upto != event.hi:
            raise ProtocolViolation(
                f"path {event.path}: buckets up to {event.hi} are done, but the run under way goes "
                f"up to {path.running_upto}"
            )
        before = path.position
        assert before is not None
        path.position, path.running_upto = event.hi, None
        path.needs_from, path.horizon = event.needs_from, event.horizon
        path.waiting = [(bucket, rows) for bucket, rows in path.waiting if bucket > event.hi]
        actions: list[Action] = []
        every = self.checkpoint_buckets
        last = path.durable[0] if path.durable else path.origin - 1
        if every and event.hi - last >= every:
            actions.append(Checkpoint(event.path, event.hi))
        return [*actions, *self._acknowledge(path), *self._next(path)]

    # -- decisions --------------------------------------------------------------------------------

    def _reading(self, stream: str) -> list[_PathState]:
        return [path for path in self.paths.values() if stream in path.plan.inputs]

    def _next(self, path: _PathState) -> list[Action]:
        """The next group: all whole buckets, as far as the limits of one job go."""
        whole = path.sunion.whole_upto()
        if path.running_upto is not None or path.ended or whole is None:
            return []
        assert path.position is not None
        ended = whole >= FOREVER
        if ended:
            assert path.ended_upto is not None
            whole = max(path.ended_upto, path.horizon)
        if whole <= path.position:
            if ended:
                path.ended = True
                return [End(path.plan.name)]
            return []
        hi, rows, buckets = whole, 0, 0
        for bucket, count in path.waiting:
            if bucket > whole:
                break
            rows, buckets = rows + count, buckets + 1
            too_many = buckets > self.group_buckets_max or rows > self.group_rows_max
            if too_many and bucket > path.position + 1 and buckets > 1:
                hi = bucket - 1
                break
        path.running_upto = hi
        return [Run(path.plan.name, path.position + 1, hi)]

    def _acknowledge(self, path: _PathState) -> list[Action]:
        actions: list[Action] = []
        for stream in path.plan.inputs:
            readers = self._reading(stream)
            if any(other.position is None for other in readers):
                continue
            received = min(other.position for other in readers if other.position is not None)
            needed = min(self._needed(other) for other in readers)
            if self._told.get(stream) != (received, needed):
                self._told[stream] = (received, needed)
                actions.append(Acknowledge(stream, received, needed))
        return actions

    def _needed(self, path: _PathState) -> int:
        """Last bucket of the inputs that nothing will ask for again."""
        assert path.position is not None
        keep_from = min(path.needs_from, path.position + 1)
        if self.recovery == "checkpoint":
            keep_from = min(keep_from, path.durable[1] if path.durable else path.origin)
            return keep_from - 1
        if not path.plan.convergent:
            return path.origin - 1
        delivered = min(
            (self._delivered.get(output, path.origin - 1) for output in path.plan.outputs),
            default=path.origin - 1,
        )
        keep_from = min(keep_from, delivered + 1 - path.plan.extent)
        if self.checkpoint_buckets:
            keep_from = min(keep_from, path.durable[1] if path.durable else path.origin)
        return max(keep_from, path.origin) - 1
