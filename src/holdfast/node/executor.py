"""The work of a node without its threads: performing the actions of `core.progress` on a log, an
engine and the inputs. The `Performer` makes no decisions and never blocks: a `Carrier` runs
everything that takes time and returns the result as an event. The carrier of `node` uses threads,
that of the simulator virtual time; both use this module."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.core.connection import check_source
from holdfast.core.eventual_checkpoint import Settings
from holdfast.core.job_size import JobLimits
from holdfast.core.progress import Progress
from holdfast.core.sunion import Partial
from holdfast.engine.inputs import Results
from holdfast.engine.state import Line, Version
from holdfast.errors import LogUnusable, ProtocolViolation, StorageFull, StorageLost, TooLarge
from holdfast.model.fragments import Fragment, Path, is_pair, recovery_of
from holdfast.node import correction_requests
from holdfast.node.checkpoints import Checkpoints
from holdfast.node.comparison import Comparison, digest_of
from holdfast.node.input_index import Best, InputIndex
from holdfast.node.node_events import (
    Again,
    Arrived,
    Asked,
    Carrier,
    DigestsReceived,
    Event,
    Finished,
    Flushed,
    InputDigestsReceived,
    LeaseDue,
    Recomputation,
    Refused,
    Replied,
    StateAsked,
    StateReleased,
    StateRenewed,
    StepEngine,
    Woken,
    Work,
)
from holdfast.node.pieces import run_stable
from holdfast.node.plans import horizon, plan_of
from holdfast.node.state_lending import Lender
from holdfast.storage import Ended, Log
from holdfast.streams.calls import Postponement
from holdfast.streams.delivery import Delivery
from holdfast.streams.serving import Service
from holdfast.streams.soutput import SOutput
from holdfast.types import OutputState, StreamInfo

_log = logging.getLogger("holdfast.node")
#: Pause before a write to a full disk is retried.
FULL_S = 1.0


class Performer:
    """Runs `fragment`. One thread calls `take`; other threads may call `step` and `receive`."""

    def __init__(
        self,
        name: str,
        fragment: Fragment,
        engine: StepEngine,
        log: Log,
        service: Service,
        carrier: Carrier,
        options: Options,
        *,
        inputs: InputIndex,
        clock: Callable[[], int],
        peers: tuple[str, ...] = (),
    ) -> None:
        self.name, self.fragment, self.engine, self.log = name, fragment, engine, log
        self.inputs, self._peers = inputs, peers
        self._carrier, self._clock = carrier, clock
        self.paths = {path.name: path for path in fragment.paths}
        self._service = service
        self.versions: dict[str, Version] = {}
        recovery = recovery_of(engine.network, fragment.name, options)
        protection = engine.network.protection(fragment.name)
        settings = Settings.of(protection) if recovery == "cec" else None
        self.checkpoints = Checkpoints(name, log, engine, clock, settings)
        #: Newest version of the tentative line of each path that has one.
        self._tentative: dict[str, Version] = {}
        #: Versions that the tentative runs under way started from. Their line may have ended.
        self._read: dict[tuple[str, int], Version] = {}
        self.lender = Lender(name, fragment, log, service, carrier.post)
        self.comparison = Comparison(name, fragment, log, carrier, 1 + len(peers))
        #: Digests of recomputed buckets.
        self._recomputed: dict[Recomputation, str] = {}
        #: Paths whose stable version was discarded, to be rebuilt when needed.
        self._forgotten: set[str] = set()
        self.soutput = SOutput(log, engine.digest)
        self._opened: set[str] = set()
        #: Actions in order: later ones rely on earlier ones, so a full disk blocks all of them.
        self._waiting: deque[core.Action] = deque()
        self._blocked = False
        #: Why the node makes no progress at the moment; the node retries.
        self.trouble: str | None = None
        self.steps = 0
        self.tentative_steps = 0
        #: Number of failed tentative steps; the stable line does not depend on them.
        self.tentative_failures = 0
        #: Reply functions of the peers that wait for an answer, by ticket.
        self._replies: dict[int, Callable[[Postponement], None]] = {}
        self._tickets = itertools.count(1)
        self.jobs = 0
        self.step_seconds: deque[float] = deque(maxlen=1_000)
        self._plans = {
            p.name: plan_of(p, engine.network, fragment.name, peers) for p in fragment.paths
        }
        resumed = self._recover()
        # A node without peers is not part of a pair.
        pair = bool(peers) and is_pair(engine.network, fragment.name)
        self.core = Progress(
            self._plans.values(),
            me=name,
            resumed=resumed,
            recovery="pairs" if pair else recovery,
            checkpoint_buckets=options.checkpoint_buckets,
            limits=JobLimits(
                options.group_buckets_max, options.group_rows_max, options.group_bytes_max
            ),
            buffer_buckets=options.buffer_buckets,
            eventual=self.checkpoints.eventual,
        )
        #: The node also reads tentative buckets of its inputs.
        self.tentative = protection.on_failure != "block"
        #: Last stable bucket of each input in the index; None: none yet.
        self._received: dict[str, int | None] = dict.fromkeys(fragment.inputs)
        for output in fragment.outputs:
            service.logs[output] = log
            service.states[output] = OutputState.STABILIZATION
        service.on_ack.append(self._on_ack)

    @property
    def ended(self) -> bool:
        return not self._waiting and all(state.ended for state in self.core.paths.values())

    # -- recovery -------------------------------------------------------------------------------

    def _recover(self) -> dict[str, tuple[int, int, int]]:
        """For each path, the newest durable version whose files are usable: its bucket, the first
        bucket of the inputs that it needs, and the first bucket of the outputs."""
        resumed: dict[str, tuple[int, int, int]] = {}
        found = self.checkpoints.recover(self.fragment.paths)
        self.versions.update(found)
        for name, version in found.items():
            origin = min(self.log.info(output).starts_at for output in self.paths[name].outputs)
            resumed[name] = (version.bucket, self._needs_from(version), origin)
        self.checkpoints.clean_up()
        return resumed

    def wanted(self, stream: str) -> int | None:
        """First bucket of an input that recovered versions refer to; None: the oldest available."""
        path_names = [path.name for path in self.fragment.paths if stream in path.inputs]
        needed_from = [
            self._needs_from(self.versions[name]) for name in path_names if name in self.versions
        ]
        return min(needed_from) if len(needed_from) == len(path_names) else None

    # -- called by the carrier ------------------------------------------------------------------

    def receive(self, delivery: Delivery) -> None:
        """Take the new buckets of a delivery; post their boundary once the rows are indexed."""
        opened = None
        if delivery.stream not in self._opened and delivery.info is not None:
            self._check_source(delivery.info)
            opened = (delivery.info.starts_at, delivery.info.trimmed_upto)
        previous_upto = self._received[delivery.stream]
        news = delivery.ended or previous_upto is None or delivery.upto > previous_upto
        if opened is None and not news and delivery.tentative_upto is None:
            return  # a heartbeat
        rows = self.inputs.add(delivery, self.engine.time(delivery.stream))
        self.comparison.note_input(delivery)
        self._opened.add(delivery.stream)
        # Another replica may have delivered more than this one.
        upto = delivery.upto if previous_upto is None else max(previous_upto, delivery.upto)
        self._received[delivery.stream] = upto
        self._carrier.post(
            Arrived(delivery.stream, upto, tuple(rows), delivery.ended, opened,
                    delivery.tentative_upto, delivery.missing, delivery.partial, delivery.spent_us)
        )  # fmt: skip

    def _check_source(self, info: StreamInfo) -> None:
        """Refuse a source whose log is an older copy. A node that restarts from its checkpoint
        requests older buckets, so the source cannot detect this; the results of the node show how
        far the source had come."""
        if any(op.name == info.name for op in self.engine.network.sources):
            paths = [path for path in self.fragment.paths if info.name in path.inputs]
            outputs = (output for path in paths for output in path.outputs)
            check_source(info, self.soutput.computed_upto(outputs))

    def step(self, work: Work, version: Version) -> Version:
        """Compute buckets and log the results: write the data first, then one append."""
        path = self.paths[work.path]
        if isinstance(work, Recomputation):
            digest, after = digest_of(work, self.engine, path, version, self.inputs)
            self._recomputed[work] = digest
            return after
        if isinstance(work, core.RunTentative):
            result = self.engine.run(
                path, version, work.lo, work.hi, Best(self.inputs), line="tentative",
                on_results=partial(self.soutput.tentative, work),
            )  # fmt: skip
            self.jobs += result.jobs
            return result.version

        def on_results(results: Results) -> None:
            self._service.spent_us.update(dict.fromkeys(path.outputs, work.spent_us))
            self.soutput.stable(work, path, results)

        try:
            result = run_stable(self.engine, path, version, work, self.inputs, on_results)
        except Exception as err:
            self.inputs.check(path.inputs, version.needs_from, work.hi, self.name, err)
            raise
        self.jobs += result.jobs
        self.comparison.note(path.outputs)
        return result.version

    def flush(self, version: Version, costs: tuple[float, ...]) -> int:
        """Make a version durable. Returns the number of entries that became durable."""
        return self.checkpoints.write(version, costs)

    def _on_ack(self, stream: str, needed: int, received: int) -> None:
        if stream in self.fragment.outputs:
            self._carrier.post(core.Acknowledged(self._clock(), stream, needed, received))

    # -- events in, actions performed -----------------------------------------------------------

    def take(self, event: Event) -> None:
        """Handle an event and perform the actions. Raises errors that must stop the node."""
        self._waiting.extend(self._decide(event))
        if self._blocked and not isinstance(event, Again):
            return
        self._blocked = False
        while self._waiting:
            try:
                self._perform(self._waiting[0])
            except StorageFull as err:
                self._wait_for_space(err)
                self._blocked = True
                self._carrier.post(Again(), FULL_S)
                return
            self._waiting.popleft()
        if isinstance(event, Again):
            self.trouble = None

    def _decide(self, event: Event) -> list[core.Action]:
        at = self._clock()
        match event:
            case Arrived():
                actions: list[core.Action] = []
                if event.opened is not None:
                    actions += self.core.handle(core.InputOpened(at, event.stream, *event.opened))
                return actions + self.core.handle(
                    core.BoundaryArrived(at, event.stream, event.upto, event.rows, event.ended,
                                         event.tentative_upto, event.missing,
                                         Partial(*event.partial), event.spent_us)
                )  # fmt: skip
            case Finished():
                if isinstance(event.run, core.RunTentative):
                    return self._finished_tentative(event.run, event, at)
                if isinstance(event.run, Recomputation):
                    return self._finished_recomputation(event.run, event, at)
                return self._finished(event.run, event, at)
            case Flushed():
                return self._flushed(event, at)
            case Asked():
                self._replies[ticket := next(self._tickets)] = event.reply
                return self.core.handle(correction_requests.asked(event.asks, at, ticket))
            case Replied():
                answered = correction_requests.answered(event, at)
                return [] if answered is None else self.core.handle(answered)
            case StateAsked() | StateRenewed() | StateReleased() | LeaseDue():
                self.lender.handle(event, at, self.versions, self._forgotten)
                return []
            case DigestsReceived():
                self.comparison.compare(event, at, self._to_recompute_from())
                return []
            case InputDigestsReceived():
                self.comparison.compare_with_inputs(event, at, self._to_recompute_from())
                return []
            case Woken():
                return self.core.handle(core.Tick(at))
            case Refused():
                raise event.error
            case Again():
                return [] if event.step is None else [event.step]
            case _:  # time must not go back for the core, so use the current time
                return self.core.handle(event if event.at == at else replace(event, at=at))

    def _finished(self, run: core.Run, event: Finished, at: int) -> list[core.Action]:
        if isinstance(event.error, StorageFull | TooLarge):
            self._release(self.paths[run.path])  # of steps before the one that failed
        if isinstance(event.error, StorageFull):
            self._wait_for_space(event.error)
            self._carrier.post(Again(run), FULL_S)
            return []
        if isinstance(event.error, TooLarge):
            _log.info("node %s: %s; the step is split", self.name, event.error)
            return self.core.handle(core.StepTooLarge(at, run.path, None, str(event.error)))
        if event.error is not None:
            raise event.error
        version, path = event.version, self.paths[run.path]
        assert version is not None
        self.trouble = None
        self.steps += 1
        self.step_seconds.append(event.seconds)
        self.versions[run.path] = version
        self._forgotten.discard(run.path)
        self._release(path)
        extent = self._plans[run.path].extent
        upto = horizon(path, version, self.inputs, extent, self.engine.width_us)
        done = core.StepDone(
            at, run.path, version.bucket, self._needs_from(version), upto,
            version.entries(), version.keys(), int(1e6 * event.seconds), version.layered(),
            self.engine.is_merging,
        )  # fmt: skip
        return self.core.handle(done)

    def _flushed(self, event: Flushed, at: int) -> list[core.Action]:
        version, took_us = event.version, int(1e6 * event.seconds)
        path = self.paths[version.path]
        del self.checkpoints.flushing[path.name]
        if isinstance(event.error, StorageFull):
            self.checkpoints.wait_for_space(path.name, event.error)
            self._carrier.post(core.CheckpointFailed(at, path.name), FULL_S)
            return []
        if event.error is not None:
            raise event.error
        self.checkpoints.written(path.name, event.seconds)
        if self.core.paths[path.name].running_upto is None:  # else when its step is finished
            self._release(path)
        done = core.CheckpointDone(
            at, path.name, version.bucket, self._needs_from(version),
            version.entries(), event.new_entries, took_us,
        )  # fmt: skip
        return self.core.handle(done)

    def _finished_tentative(
        self, run: core.RunTentative, event: Finished, at: int
    ) -> list[core.Action]:
        path = self.paths[run.path]
        del self._read[run.path, run.line]
        failed = core.TentativeDone(at, run.path, run.line, None)
        if isinstance(event.error, StorageFull):
            self._wait_for_space(event.error)
            self._carrier.post(replace(failed, no_pause=True), FULL_S)
            return []
        if isinstance(event.error, TooLarge):
            self._tentative_failed(event.error)
            return self.core.handle(core.StepTooLarge(at, run.path, run.line, str(event.error)))
        if event.error is not None:
            if isinstance(event.error, ProtocolViolation | LogUnusable):
                raise event.error  # the stable line could not continue either
            if not self.inputs.drop_gone(path.inputs):  # otherwise rows were replaced meanwhile
                self._tentative_failed(event.error)
            return self.core.handle(failed)
        assert event.version is not None
        needs_from = self._needs_from(event.version)
        done = core.TentativeDone(at, run.path, run.line, run.hi, needs_from)
        self.trouble = None
        self.tentative_steps += 1
        if self.soutput.lines.get(run.path) == run.line:
            self._tentative[run.path] = event.version
        self._release(path, "tentative")
        if run.path in self._forgotten and self.core.paths[run.path].running_upto is None:
            self._release(path)  # also files that only the stable version used
        return self.core.handle(done)

    def _tentative_failed(self, err: BaseException) -> None:
        """Record the failure of a tentative step. The step is retried."""
        self.tentative_failures += 1
        trouble = f"a tentative step failed: {type(err).__name__}: {err}"
        if self.trouble != trouble:
            _log.warning("node %s: %s; the step is retried", self.name, trouble)
        self.trouble = trouble

    def _finished_recomputation(
        self, run: Recomputation, event: Finished, at: int
    ) -> list[core.Action]:
        digest = self._recomputed.pop(run, None)
        self.comparison.finished(run, digest, event.error, at, self._to_recompute_from())
        self._release(self.paths[run.path], "recomputation")
        return []

    def _to_recompute_from(self) -> dict[str, Version]:
        """Checkpoints of paths without tentative line; empty if replicas are not compared."""
        durable = dict(self.checkpoints.newest)  # a checkpoint may be written meanwhile
        excluded = self._tentative if self._compares else durable
        return {name: v for name, v in durable.items() if name not in excluded}

    @property
    def _compares(self) -> bool:
        """There are peers to compare with, and regular checkpoints to recompute buckets from."""
        return bool(self._peers and self.core.checkpoint_buckets)

    def _release(self, path: Path, line: Line = "stable") -> None:
        """Release the files of versions that can no longer be used."""
        used = [self.versions[path.name]] if path.name not in self._forgotten else []
        held_by = (self.checkpoints.newest, self.checkpoints.flushing, self._tentative)
        used += [held[path.name] for held in held_by if path.name in held]
        used += [version for (name, _), version in self._read.items() if name == path.name]
        used += [*self.lender.versions(path.name), *self.comparison.versions(path.name)]
        self.engine.release(path, used, line=line)

    def _wait_for_space(self, err: StorageFull) -> None:
        if self.trouble is None:
            _log.warning("node %s waits for disk space: %s", self.name, err)
        self.trouble = str(err)

    def _perform(self, action: core.Action) -> None:
        match action:
            case core.Start():
                path = self.paths[action.path]
                self.soutput.valid_from[path.name] = action.valid_from
                if path.name not in self.versions:
                    self.versions[path.name] = self.engine.empty(path, action.bucket)
                for output in path.outputs:
                    self._open_output(output, action)
            case core.Run():
                version = self.versions[action.path]
                if action.rebuild_from is not None:
                    version = self.engine.empty(self.paths[action.path], action.lo - 1)
                self._carrier.run(action, version)
            case core.Enter():
                self.soutput.lines[action.path] = action.line
                self._tentative[action.path] = self.versions[action.path]
                if action.forget:
                    self._forgotten.add(action.path)
            case core.RunTentative():
                began_from = self._read[action.path, action.line] = self._tentative[action.path]
                self._carrier.run(action, began_from)
            case core.Leave():
                self.soutput.leave(self.paths[action.path])
                del self._tentative[action.path]
                self._release(self.paths[action.path], "tentative")
            case core.Change():
                for output in self.paths[action.path].outputs:
                    self._service.states[output] = action.state
                _log.info("node %s: path %s is now %s", self.name, action.path, action.state)
            case core.Ask():
                self._carrier.ask(correction_requests.question(action, self.name), self._peers)
            case core.Reply():
                self._replies.pop(action.ticket)(correction_requests.reply(action))
            case core.Wake():
                self._carrier.post(Woken(), max(0.0, (action.at - self._clock()) / 1e6))
            case core.Checkpoint():
                version = self.checkpoints.began(self.versions[action.path])
                self._carrier.flush(version, action.costs)
            case core.RecoveryDone():
                self.checkpoints.report(action)
            case core.Acknowledge():
                self.inputs.forget(action.stream, self._unreferenced(action.stream))
                self._carrier.acknowledge(
                    action.stream, action.received, action.no_longer_needed, self.log.epoch
                )
            case core.End():
                for output in self.paths[action.path].outputs:
                    if not self.log.info(output).ended:
                        self.log.append(Ended(output))
            case core.Fail():
                raise StorageLost(self.checkpoints.explained(action.path, action.why))
            case core.GiveUp():
                raise TooLarge(action.why)

    def _open_output(self, output: str, start: core.Start) -> None:
        self.log.open_stream(
            output, self.engine.schema(output), self.engine.time(output), start.origin,
            gone_upto=start.valid_from - 1,
        )  # fmt: skip
        if self._service.all_spoke(output):  # acknowledged to an earlier instance
            self._on_ack(output, self.log.trimmable(output), self.log.received(output))

    def _unreferenced(self, stream: str) -> int:
        """Last bucket of the stream that no version reads any more: neither the current versions,
        stable and tentative, nor the versions that a bucket may be recomputed from."""
        names = [path.name for path in self.fragment.paths if stream in path.inputs]
        read = [self.versions[name] for name in names]
        read += [self._tentative[name] for name in names if name in self._tentative]
        read += [version for (name, _), version in self._read.items() if name in names]
        durable = self.checkpoints.newest if self._compares else {}
        read += [durable[name] for name in names if name in durable]
        read += [version for name in names for version in self.comparison.versions(name)]
        return min(map(self._needs_from, read)) - 1

    def _needs_from(self, version: Version) -> int:
        return self._plans[version.path].needs_from(version.bucket, version.needs_from)
