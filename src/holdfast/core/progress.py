"""A node's decisions: which buckets to run, what to retain, what to acknowledge upstream. Pure.

Events in, actions out; the driver performs the actions in order. Each path waits for complete
buckets (`SUnion`), runs them in groups, appends the results, writes checkpoints, and acknowledges
its inputs with two positions, *received* and *released*, of which only the second allows trimming
(`retention`).
`consistency` decides what runs without complete buckets, and how those results are corrected.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import assert_never

from holdfast.core import durability
from holdfast.core.consistency import PIECE_BUCKETS
from holdfast.core.eventual_checkpoint import EventualCheckpoint
from holdfast.core.job_size import DEFAULT_LIMITS, JobLimits
from holdfast.core.path_state import PathState, path_state
from holdfast.core.progress_events import (
    Acknowledge,
    Acknowledged,
    Action,
    Answered,
    Ask,
    Asked,
    Began,
    BoundaryArrived,
    Change,
    CheckpointDone,
    CheckpointFailed,
    End,
    Enter,
    Event,
    Fail,
    GiveUp,
    InputOpened,
    Leave,
    PathPlan,
    Reply,
    Run,
    RunTentative,
    Start,
    StepDone,
    StepTooLarge,
    TentativeDone,
    Tick,
    Unpaired,
    Wake,
)
from holdfast.core.retention import released_upto
from holdfast.core.sunion import FOREVER
from holdfast.core.wake_ups import Alarm
from holdfast.errors import ProtocolViolation
from holdfast.types import OutputState

#: Buckets between two checkpoints of an unpaired replica, if `checkpoint_buckets` is 0.
PAIR_CHECKPOINT_BUCKETS = 20
#: A path has caught up after so many steps in a row that each took every complete bucket.
CAUGHT_UP_STEPS = 2
#: Number of recent events that a `ProtocolViolation` reports.
STORY = 30


class Progress:
    """The state machine of one node."""

    def __init__(
        self,
        paths: Iterable[PathPlan],
        *,
        me: str = "",
        resumed: dict[str, tuple[int, int, int]] | None = None,
        recovery: str = "replay",
        checkpoint_buckets: int = 100,
        limits: JobLimits = DEFAULT_LIMITS,
        buffer_buckets: int | None = None,
        eventual: Mapping[str, EventualCheckpoint] | None = None,
    ) -> None:
        self.buffer_buckets = buffer_buckets
        self.recovery = recovery
        #: This replica belongs to a pair, and its peer is dead.
        self.unpaired = False
        self.checkpoint_buckets = checkpoint_buckets
        resume_points = resumed or {}
        # Upstream stops when `buffer_buckets` are full: a larger piece would never become complete.
        piece = PIECE_BUCKETS if buffer_buckets is None else max(1, buffer_buckets // 2)
        self.paths = {
            plan.name: path_state(
                plan, resume_points.get(plan.name), me, min(piece, PIECE_BUCKETS), limits
            )
            for plan in paths
        }
        for name, control in (eventual or {}).items():
            self.paths[name].eventual = control
        self.received: dict[str, int] = {}
        #: Last acknowledgement of each input: received, released.
        self._acknowledged: dict[str, tuple[int, int]] = {}
        #: Per output: the last bucket that all consumers have released, and have received.
        self._delivered: dict[str, int] = {}
        self._had: dict[str, int] = {}
        self._alarm = Alarm()
        #: Recent events and their actions, formatted only for a `ProtocolViolation`.
        self._story: deque[tuple[Event, tuple[Action, ...]]] = deque(maxlen=STORY)

    def handle(self, event: Event) -> list[Action]:
        """The only method that changes the state."""
        try:
            actions = self._handle(event)
        except ProtocolViolation as err:
            lines = [f"{event} -> {[*actions]}" for event, actions in self._story]
            story = "\n".join(["", *lines, f"{event} -> ?"])
            raise ProtocolViolation(f"{err}; recent events, oldest first:{story}") from None
        self._story.append((event, tuple(actions)))
        return actions

    def _handle(self, event: Event) -> list[Action]:
        match event:
            case Began():
                resumed = [path for path in self.paths.values() if path.resumed is not None]
                return [action for path in resumed for action in self._start(path, event.at)]
            case InputOpened():
                return self._opened(event)
            case BoundaryArrived():
                return self._boundary(event)
            case StepDone():
                return self._done(event)
            case StepTooLarge():
                return self._too_large(event)
            case CheckpointDone():
                path = self.paths[event.path]
                return [*durability.done(path, event), *self._acknowledge(path)]
            case CheckpointFailed():
                return durability.failed(self.paths[event.path], event.at)
            case Acknowledged():
                self._delivered[event.output] = max(
                    event.needed, self._delivered.get(event.output, event.needed)
                )
                self._had[event.output] = event.received
                actions: list[Action] = []
                for path in self.paths.values():
                    if event.output in path.plan.outputs and path.position is not None:
                        # The next step acknowledges upstream; an ended path has no next step.
                        actions += self._acknowledge(path) if path.ended else []
                        actions += self._next(path, event.at) if self.buffer_buckets else []
                return actions
            case TentativeDone():
                return self._tentative_done(event)
            case Asked():
                return self._asked(event)
            case Answered():
                path = self.paths[event.path]
                path.consistency.promises.answered(event, path.sunion.newest(), path.reached)
                return self._next(path, event.at)
            case Unpaired():
                return self._unpaired(event.unpaired, event.at)
            case Tick():
                self._alarm.rang()
                started = [path for path in self.paths.values() if path.position is not None]
                return [action for path in started for action in self._next(path, event.at)]
            case _:
                assert_never(event)

    # -- one method per event ---------------------------------------------------------------------

    def _opened(self, event: InputOpened) -> list[Action]:
        actions: list[Action] = []
        for path in self._reading(event.stream):
            path.origins.setdefault(event.stream, (event.starts_at, event.trimmed_upto))
            needs_from = FOREVER if path.resumed is None else max(path.resumed[1], event.starts_at)
            if path.resumed is not None and event.trimmed_upto >= needs_from:
                # The producer does not notice if the node requests no certain bucket (`wanted`).
                why = (
                    f"path {path.plan.name!r} resumes from bucket {path.resumed[0]} and needs "
                    f"{event.stream!r} from bucket {path.resumed[1]}, but its buckets up to "
                    f"{event.trimmed_upto} were released and deleted: the storage of this node is "
                    "an older copy"
                )
                return [Fail(path.plan.name, why)]
            if path.position is None and len(path.origins) == len(path.plan.inputs):
                actions += self._start(path, event.at)
        return actions

    def _start(self, path: PathState, at: int) -> list[Action]:
        plan, begin = path.plan, path.begin(self.recovery)
        if isinstance(begin, str):
            return [Fail(plan.name, begin)]
        bucket, valid_from = begin
        path.position = bucket
        actions: list[Action] = [Start(plan.name, bucket, path.origin, valid_from)]
        if self.buffer_buckets or self.recovery == "pairs":
            # Producers need the first position: with bounded buffers they wait for this node, and
            # with pairs they retain inputs for it.
            actions += self._acknowledge(path)
        return [*actions, *self._next(path, at)]

    def _boundary(self, event: BoundaryArrived) -> list[Action]:
        actions: list[Action] = []
        self.received[event.stream] = max(event.upto, self.received.get(event.stream, event.upto))
        rows = sum(count for _, count, _ in event.rows)
        for path in self._reading(event.stream):
            sunion = path.sunion
            sunion.boundary(
                event.stream, event.upto, event.at,
                ended=event.ended, rows=rows, spent_us=event.spent_us,
            )  # fmt: skip
            if event.tentative_upto is not None:
                sunion.tentative(
                    event.stream, event.tentative_upto, event.at, event.missing, event.partial
                )
            for file in event.rows:
                insort(path.waiting, file)
            starts_at, _ = path.origins.get(event.stream, (event.upto, 0))
            if not event.ended or event.upto >= starts_at:  # else the input ended without a bucket
                before = path.ended_upto
                path.ended_upto = event.upto if before is None else max(before, event.upto)
            if path.position is not None:
                actions += self._next(path, event.at)
        return actions

    def _done(self, event: StepDone) -> list[Action]:
        path = self.paths[event.path]
        if path.running_upto != event.hi:
            raise ProtocolViolation(
                f"path {event.path}: a step up to bucket {event.hi} is done, expected the running "
                f"step up to bucket {path.running_upto}"
            )
        before = path.position
        assert before is not None
        path.position, path.running_upto = event.hi, None
        path.job_size.fitted(event.hi - before)
        rows = path.take_waiting(event.hi)
        path.needs_from, path.horizon = event.needs_from, event.horizon
        interval = self.checkpoint_buckets
        if self.recovery == "pairs":
            interval = interval or (PAIR_CHECKPOINT_BUCKETS if self.unpaired else 0)
        actions = durability.after_step(path, event, rows, interval)
        path.sunion.done(event.hi)
        actions += self._caught_up(path)
        return [*actions, *self._acknowledge(path), *self._next(path, event.at)]

    def _too_large(self, event: StepTooLarge) -> list[Action]:
        """Never repeat the step as it was: compute fewer buckets, or give up on a single one."""
        path = self.paths[event.path]
        consistency = path.consistency
        if event.line is not None:
            after, upto = consistency.position, consistency.running_upto
            if consistency.line == event.line and after is not None and upto is not None:
                has_smaller = path.job_size.too_large(upto - after)
                failed = TentativeDone(event.at, event.path, event.line, None, no_pause=has_smaller)
                return self._tentative_done(failed)
            return []  # the line ended while this step ran
        assert path.position is not None and path.running_upto is not None
        buckets, path.running_upto = path.running_upto - path.position, None
        consistency.forgotten = path.rebuilds
        if not path.job_size.too_large(buckets):
            remedy = "stop the run and start it with more memory (--memory), or use partitions"
            return [GiveUp(event.path, f"{event.why}; {remedy}")]
        return self._next(path, event.at)

    def _tentative_done(self, event: TentativeDone) -> list[Action]:
        path = self.paths[event.path]
        consistency = path.consistency
        if consistency.line != event.line or consistency.position is None:
            return []  # the line ended while this step ran
        consistency.running_upto = None
        if event.hi is None:
            if not event.no_pause:
                consistency.failed(event.at)
            assert path.position is not None
            overtaken = path.position > consistency.position
            return [*(self._caught_up(path) if overtaken else ()), *self._next(path, event.at)]
        path.job_size.fitted(event.hi - consistency.position)
        consistency.position, consistency.failures = event.hi, 0
        if event.needs_from is not None:
            consistency.needs_from = event.needs_from
        return [*self._caught_up(path), *self._next(path, event.at)]

    def _asked(self, event: Asked) -> list[Action]:
        path = self.paths[event.path]
        consistency = path.consistency
        started = path.position is not None and not path.ended
        able = started and consistency.answers(event.at)
        wants = consistency.state is OutputState.UP_FAILURE
        newest = path.sunion.newest() or 0  # unused without inputs: `able` is then False
        answer = consistency.promises.asked(event, newest, able=able, wants=wants)
        if path.position is None:
            return [Reply(event.ticket, answer)]
        reached = path.reached if answer == "answering" else None
        return [Reply(event.ticket, answer, reached), *self._next(path, event.at)]

    def _unpaired(self, unpaired: bool, at: int) -> list[Action]:
        """The peer died or returned. A replica that becomes unpaired writes checkpoints at once,
        because no other replica can restore its state."""
        before, self.unpaired = self.unpaired, unpaired
        if not unpaired or before:
            return []
        return [action for path in self.paths.values() for action in durability.at_once(path, at)]

    # -- decisions --------------------------------------------------------------------------------

    def _reading(self, stream: str) -> list[PathState]:
        return [path for path in self.paths.values() if stream in path.plan.inputs]

    def _next(self, path: PathState, at: int) -> list[Action]:
        """Schedule the stable line before the tentative line. The order is reversed after a step
        that passed over an overdue bucket, so a busy stable line delays the tentative line by at
        most one step."""
        first = self._next_tentative(path, at) if path.passed_over else []
        return [
            *first, *self._next_stable(path, at), *self._renewal(path, at),
            *([] if first else self._next_tentative(path, at)), *self._wake(path, at),
        ]  # fmt: skip

    def _next_stable(self, path: PathState, at: int) -> list[Action]:
        """The next group: all complete buckets, within the limits of one job."""
        complete = path.sunion.all_complete_upto()
        if path.running_upto is not None or path.ended or complete is None:
            return []
        assert path.position is not None
        consistency, ended = path.consistency, complete >= FOREVER
        if ended:
            ended_upto = path.position if path.ended_upto is None else path.ended_upto
            # A resumed path learns only from a step which windows and timers are still open.
            horizon = path.position + 1 if path.horizon is None else path.horizon
            complete = max(ended_upto, horizon)
        if complete <= path.position:
            if ended:
                path.ended = True
                corrects = consistency.state is OutputState.STABILIZATION
                stable = self._change(path, OutputState.STABLE) if corrects else []
                return [*stable, End(path.plan.name)]
            if consistency.state is OutputState.STABILIZATION and path.sunion.heard_all:
                # No further complete bucket: the correction is done, or inputs are missing again.
                over = consistency.position is None
                return self._change(path, OutputState.STABLE if over else OutputState.UP_FAILURE)
            return []
        upto = min(complete, self._room_upto(path))
        if upto <= path.position:
            return []
        actions: list[Action] = []
        if consistency.state is OutputState.UP_FAILURE:
            if self._is_corrected(path):
                if not self._may_correct(path, at):
                    return []
                actions += self._change(path, OutputState.STABILIZATION)
            elif not consistency.may_redo(upto, path.position):
                return []
        lo, rebuild_from = path.position + 1, None
        path.rebuilds = consistency.forgotten
        if consistency.forgotten:
            rebuild_from, lo = lo, max(path.origin, lo - path.plan.extent)
            consistency.forgotten = False
        hi = path.job_size.last(path.waiting, path.position, upto)
        if path.eventual is not None:
            hi = path.eventual.last(path.position, hi)
        corrected = consistency.state is OutputState.STABILIZATION and consistency.position is None
        if corrected and path.steps_caught_up >= CAUGHT_UP_STEPS and path.sunion.heard_all:
            # The waiting buckets arrived during the last step: the path keeps up with its inputs.
            actions += self._change(path, OutputState.STABLE)
        path.steps_caught_up = path.steps_caught_up + 1 if hi == complete else 0
        path.running_upto = hi
        path.passed_over = path.sunion.is_overdue(hi, at)
        spent_us = path.sunion.spent_us(at)
        upkeep = durability.upkeep(path, hi, at)
        return [*actions, Run(path.plan.name, lo, hi, rebuild_from, spent_us, upkeep)]

    def _is_corrected(self, path: PathState) -> bool:
        """Every bucket that was published as tentative is complete (REC_REQUEST)."""
        complete = path.sunion.all_complete_upto()
        assert complete is not None
        return min(complete, self._room_upto(path)) >= path.consistency.reached

    def _may_correct(self, path: PathState, at: int) -> bool:
        """Whether a correction may start: a peer has promised to keep answering meanwhile, or no
        peer is able to answer."""
        promises = path.consistency.promises
        if not promises.peers:
            return True
        if promises.waits_for(at) is not None:
            return False
        promises.begin(path.consistency.line)
        return promises.decision(at) in ("answering", "away")

    def _renewal(self, path: PathState, at: int) -> list[Action]:
        consistency = path.consistency
        promises, correction = consistency.promises, consistency.promises.correction
        if correction is None:
            return []
        assert path.position is not None
        started = consistency.state is OutputState.STABILIZATION and not path.ended
        wants = (
            consistency.state is OutputState.UP_FAILURE
            and promises.waits_for(at) is None
            and self._is_corrected(path)
        )
        if not (started or wants):
            notify = promises.end()
            return [Ask(path.plan.name, correction, path.position, done=True)] if notify else []
        ask = Ask(path.plan.name, correction, path.position, started)
        return [ask] if promises.due(at) else []

    def _room_upto(self, path: PathState) -> int:
        """Last bucket that may run: `buffer_buckets` after the last one that the slowest consumer
        has received. No limit applies when all inputs have ended: a consumer that has received
        everything reports no position to a rebuilt node."""
        complete = path.sunion.all_complete_upto()
        if self.buffer_buckets is None or (complete is not None and complete >= FOREVER):
            return FOREVER
        received = [self._had.get(name, path.origin - 1) for name in path.plan.outputs]
        return min(received, default=FOREVER) + self.buffer_buckets

    def _caught_up(self, path: PathState) -> list[Action]:
        """After a step: end the tentative line if the stable line has overtaken it, including the
        tentative step under way."""
        consistency = path.consistency
        assert path.position is not None
        if consistency.position is None or path.position < consistency.reached:
            return []
        actions: list[Action] = []
        if consistency.state is OutputState.UP_FAILURE:
            actions += self._change(path, OutputState.STABILIZATION)
        consistency.drop()
        return [*actions, Leave(path.plan.name)]

    def _next_tentative(self, path: PathState, at: int) -> list[Action]:
        consistency = path.consistency
        mode = consistency.mode(at)
        if mode in (None, "block") or path.ended or consistency.running_upto is not None:
            return []
        assert path.position is not None
        after = consistency.position
        if after is None:
            # A tentative line starts from the stable state: wait until every input is known.
            complete = path.sunion.all_complete_upto()
            if path.running_upto is not None or complete is None:
                return []
            if complete > path.position and not path.passed_over:
                return []
            after = path.position
        overtaken = path.running_upto is not None and path.running_upto >= after
        due = consistency.due(at, after, overtaken=overtaken)
        hi = min(due, after + path.job_size.most)
        if hi <= after or at < consistency.retry_at:
            return []
        actions: list[Action] = []
        short = path.running_upto is None and hi - path.position <= path.job_size.most
        restart = short and consistency.worth_restarting(path.position)
        if consistency.position is None or restart:
            forget = path.plan.forgets and not restart
            consistency.begin(path.position, path.needs_from, forget=forget)
            after = path.position
            if not restart:
                actions += self._change(path, OutputState.UP_FAILURE)
            actions.append(Enter(path.plan.name, consistency.line, forget))
        outputs, missing, partial = consistency.run(after + 1, hi)
        line = consistency.line
        work = RunTentative(path.plan.name, line, after + 1, hi, outputs, missing, partial)
        return [*actions, work]

    def _wake(self, path: PathState, at: int) -> list[Action]:
        consistency = path.consistency
        assert path.position is not None
        times = [consistency.promises.next_at(at)]
        if consistency.mode(at) not in (None, "block") and consistency.running_upto is None:
            after = path.position if consistency.position is None else consistency.position
            expiry = path.sunion.next_expiry(after, at)
            times.append(expiry if expiry is None else max(expiry, consistency.retry_at))
            if consistency.retry_at > at:
                times.append(consistency.retry_at)
        due = min((time for time in times if time is not None and time > at), default=None)
        return [Wake(due)] if due is not None and self._alarm.needs(at, due) else []

    def _change(self, path: PathState, state: OutputState) -> list[Action]:
        path.consistency.move(state)
        path.steps_caught_up = 0
        return [Change(path.plan.name, state)]

    def _acknowledge(self, path: PathState) -> list[Action]:
        actions: list[Action] = []
        for stream in path.plan.inputs:
            paths = self._reading(stream)
            if any(other.position is None for other in paths):
                continue
            received = min(other.position for other in paths if other.position is not None)
            needed = min(self._needed(other) for other in paths)
            if self._acknowledged.get(stream) != (received, needed):
                self._acknowledged[stream] = (received, needed)
                actions.append(Acknowledge(stream, received, needed))
        return actions

    def _needed(self, path: PathState) -> int:
        """Last bucket of the inputs that this path has released."""
        delivered = [self._delivered.get(name, path.origin - 1) for name in path.plan.outputs]
        return released_upto(
            path, self.recovery, unpaired=self.unpaired, checkpoints=bool(self.checkpoint_buckets),
            delivered=min(delivered, default=path.origin - 1),
        )  # fmt: skip
