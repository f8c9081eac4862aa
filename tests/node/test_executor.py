"""A node carries out the decisions of the core: on a log, an engine and inputs in memory, in
virtual time. The engine is the simulator's twin; its tentative steps fail when the scenario says
so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.core.consistency import RETRY_US, RETRY_US_MAX
from holdfast.engine.inputs import OnResults, StepResult
from holdfast.engine.state import Line, Version
from holdfast.errors import ProtocolViolation, RolledBack, StorageFull
from holdfast.model.contract import Contract
from holdfast.model.fragments import Path, fragments
from holdfast.model.network import Network
from holdfast.node.executor import Performer
from holdfast.node.node_events import Asked, Event, Finished, Flushed, Work
from holdfast.storage import Log
from holdfast.streams.calls import Postpone, Postponement
from holdfast.streams.delivery import Delivery
from holdfast.streams.serving import Service
from holdfast.types import (
    NO_UPKEEP,
    OutputState,
    Segment,
    SegmentId,
    Stability,
    StreamInfo,
    Upkeep,
)
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.simulated_engine import EngineTwin, MemoryInputs
from holdfast.verify.sim.tables import Rows, RowSegments

MS = 1_000
SCHEMA = "ts timestamp, key long, value long"
#: A bucket is one bucket width old when it arrives; `max_delay` (X in Borealis) is one second.
HELD = 900 * MS


def union() -> Network:
    net = Network("union", bucket="100ms")
    sources = [net.source(name, SCHEMA, time="ts", clock="live") for name in ("s1", "s2")]
    net.output("merged", net.union(*sources), contract=Contract(within="2s"))
    net.protect(
        "main", on_failure="process", while_correcting="process", max_delay="1s", wait_share=1
    )
    return net


class Failing(EngineTwin):
    """Raises `error` in every tentative step while `error` is set. While `full` is set, stable
    steps write a file and then find no more space."""

    error: Exception | None = None
    full = False

    def run(self, path: Path, version: Version, lo: int, hi: int, inputs: Any,
            *, line: Line = "stable", on_results: OnResults | None = None,
            upkeep: Upkeep = NO_UPKEEP) -> StepResult:  # fmt: skip
        if line == "tentative" and self.error is not None:
            raise self.error
        if line == "stable" and self.full:
            self.save(path.name, "unfinished", hi, {})
            raise StorageFull("no space left")
        return super().run(
            path, version, lo, hi, inputs, line=line, on_results=on_results, upkeep=upkeep
        )


class Node:
    """A performer and its carrier. All work is done when virtual time passes."""

    def __init__(
        self, disk: MemoryDisk, *, checkpoint_buckets: int = 0,
        network: Callable[[], Network] | None = None,
    ) -> None:  # fmt: skip
        self.disk, self.now = disk, 0
        self._network = union if network is None else network
        self._options = Options(checkpoint_buckets=checkpoint_buckets)
        self.start()

    def start(self) -> None:
        network = self._network()
        self._posted: list[tuple[int, Event]] = []
        self._works: list[tuple[Work, Version]] = []
        self._flushes: list[tuple[Version, tuple[float, ...]]] = []
        #: Checkpoints take longer than anything else; only `flushes` ends them.
        self.slow_flushes = False
        self.runs: list[Work] = []
        self.asked: list[Postpone] = []
        self.log = Log.open("/main", "main", fsync="always", disk=self.disk, segments=RowSegments())
        self.service = Service()
        self.engine = Failing(network, self.disk, "/main/state")
        (fragment,) = fragments(network)
        self.performer = Performer(
            "main", fragment, self.engine, self.log, self.service, self, self._options,
            inputs=MemoryInputs(self.disk), clock=lambda: self.now,
        )  # fmt: skip
        self._received: dict[str, int] = {}
        self.performer.take(core.Began(self.now))

    def restarts(self) -> None:
        self.log.close()
        self.start()

    # -- carrier --------------------------------------------------------------------------------

    def run(self, work: Work, version: Version) -> None:
        self.runs.append(work)
        self._works.append((work, version))

    def flush(self, version: Version, costs: tuple[float, ...]) -> None:
        self._flushes.append((version, costs))

    def ask(self, asked: Postpone, peers: tuple[str, ...]) -> None:
        self.asked.append(asked)

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        pass

    def post(self, event: Event, after_s: float = 0.0) -> None:
        self._posted.append((self.now + round(1e6 * after_s), event))

    # -- steps of a scenario --------------------------------------------------------------------

    def gets(self, stream: str, upto: int, spent_us: int = 0) -> None:
        self.receives(stream, upto, spent_us)
        self.settle()

    def receives(self, stream: str, upto: int, spent_us: int = 0) -> None:
        """Deliver one row per bucket; its value is the bucket. The first delivery describes the
        stream, and starts at the bucket that the performer needs."""
        wanted = self.performer.wanted(stream)
        first = stream not in self._received
        since = (0 if wanted is None else wanted) if first else self._received[stream] + 1
        info = StreamInfo(stream, SCHEMA, "ts", 0, upto, since - 1, 1) if first else None
        buckets = range(since, upto + 1)
        tables = [Rows([(bucket * 100 * MS, 1, bucket)]) for bucket in buckets]
        segments = tuple(
            Segment(SegmentId(stream, 0, bucket), Stability.STABLE, "", 1, "", 0, 1, 1)
            for bucket in buckets
        )
        self._received[stream] = upto
        self.performer.receive(
            Delivery(stream, since, upto, 1, segments, tables=tuple(tables), info=info,
                     spent_us=spent_us)
        )  # fmt: skip

    def settle(self) -> None:
        """Handle everything that is due, including steps and checkpoints."""
        while self._is_busy():
            if self._flushes and not self.slow_flushes:
                self.flushes()
            due = [event for at, event in self._posted if at <= self.now]
            self._posted = [(at, event) for at, event in self._posted if at > self.now]
            works, self._works = self._works, []
            for event in due:
                self.performer.take(event)
            for work, version in works:
                self.performer.take(self._step(work, version))

    def _is_busy(self) -> bool:
        flushes = bool(self._flushes) and not self.slow_flushes
        return flushes or bool(self._works) or any(at <= self.now for at, _ in self._posted)

    def flushes(self) -> None:
        """The checkpoint is written, and the performer notices it."""
        (version, costs), *self._flushes = self._flushes
        try:
            flushed = Flushed(version, self.performer.flush(version, costs))
        except Exception as err:
            flushed = Flushed(version, error=err)
        self.performer.take(flushed)

    @contextmanager
    def long_step(self) -> Iterator[None]:
        """The step under way has written its files; it ends after the body."""
        (work, version), *self._works = self._works
        finished = self._step(work, version)
        yield
        self.performer.take(finished)
        self.settle()

    def _step(self, work: Work, version: Version) -> Finished:
        try:
            return Finished(work, self.performer.step(work, version))
        except Exception as err:
            return Finished(work, None, error=err)

    def passes(self, us: int) -> None:
        end_us = self.now + us
        while (at := min((at for at, _ in self._posted), default=end_us + 1)) <= end_us:
            self.now = max(self.now, at)
            self.settle()
        self.now = end_us

    def holds(self) -> dict[int, tuple[str, int]]:
        """Stability and number of rows, by bucket."""
        stable = self.log.segments("merged", self.log.info("merged").starts_at, 10**6)
        return {s.id.bucket: (s.stability.value, s.rows)
                for s in [*stable, *self.log.tentative("merged")[0]]}  # fmt: skip

    @property
    def state(self) -> OutputState:
        return self.service.states["merged"]

    def tentative_runs(self) -> list[core.RunTentative]:
        return [run for run in self.runs if isinstance(run, core.RunTentative)]


@pytest.fixture
def node() -> Iterator[Node]:
    """STABLE up to bucket 4; s1 continues up to bucket 9, s2 does not."""
    node = Node(MemoryDisk(random.Random(1)))
    for stream in ("s1", "s2"):
        node.gets(stream, 4)
    assert node.state is OutputState.STABLE
    node.gets("s1", 9)
    yield node
    node.log.close()


def stable(buckets: int) -> dict[int, tuple[str, int]]:
    return dict.fromkeys(range(buckets), ("STABLE", 2))


def tentative(since: int, until: int) -> dict[int, tuple[str, int]]:
    return dict.fromkeys(range(since, until), ("TENTATIVE", 1))


def test_a_failure_leads_to_tentative_buckets_and_their_correction(node: Node) -> None:
    node.passes(HELD)
    assert node.state is OutputState.UP_FAILURE
    assert node.holds() == stable(5) | tentative(5, 10)
    (span,) = node.log.tentative("merged")[1]
    assert (span.missing, span.inputs) == (("s2",), 0.5)
    node.gets("s2", 7)
    assert node.holds()[7] == ("STABLE", 2) and node.holds()[8] == ("TENTATIVE", 1)
    node.gets("s2", 9)
    assert node.holds() == stable(10)
    assert node.state is OutputState.STABLE
    assert node.log.info("merged").undos == 0


class Crash(Exception):
    """For example an error of a user function."""


def test_a_failed_tentative_step_is_retried_and_the_node_continues(node: Node) -> None:
    node.engine.error = Crash("division by zero")
    node.passes(HELD)
    assert node.state is OutputState.UP_FAILURE
    assert node.performer.tentative_failures == 1
    assert node.performer.trouble == "a tentative step failed: Crash: division by zero"
    node.passes(RETRY_US)
    assert node.performer.tentative_failures == 2
    node.engine.error = None
    node.passes(2 * RETRY_US)
    assert node.holds()[9] == ("TENTATIVE", 1)
    assert node.performer.trouble is None


def test_tentative_steps_that_fail_for_an_hour_are_retried_rarely(node: Node) -> None:
    node.engine.error = Crash("division by zero")
    node.passes(3_600_000 * MS)
    assert len(node.tentative_runs()) <= 10 + 3_600_000 * MS // RETRY_US_MAX


def test_failing_tentative_steps_never_stop_the_stable_line(node: Node) -> None:
    node.engine.error = Crash("division by zero")
    for bucket in range(10, 60):
        node.passes(100 * MS)
        node.gets("s1", bucket)
        if bucket >= 25:
            node.gets("s2", bucket - 15)
    assert node.performer.tentative_failures > 3
    assert node.holds() == stable(45)
    node.gets("s2", 59)
    assert node.holds() == stable(60)
    assert node.state is OutputState.STABLE


def test_a_protocol_violation_in_a_tentative_step_stops_the_node(
    node: Node,
) -> None:
    node.engine.error = ProtocolViolation("a bucket twice")
    with pytest.raises(ProtocolViolation, match="a bucket twice"):
        node.passes(HELD)


def test_a_tentative_step_without_disk_space_is_retried(node: Node) -> None:
    node.engine.error = StorageFull("no space left")
    node.passes(HELD)
    assert node.performer.trouble == "no space left"
    assert node.performer.tentative_failures == 0, "a full disk is no failure of the step"
    node.engine.error = None
    node.passes(1_000 * MS + RETRY_US)
    assert node.holds()[9] == ("TENTATIVE", 1)


def test_a_step_without_disk_space_leaves_no_files_behind(node: Node) -> None:
    """The step is repeated: files of the attempts before would fill the disk."""
    before = node.disk.files("/main/state")
    node.engine.full = True
    node.gets("s2", 9)
    node.passes(5_000 * MS)
    assert node.performer.trouble == "no space left"
    assert node.disk.files("/main/state") == before
    node.engine.full = False
    node.passes(2_000 * MS)
    assert node.performer.trouble is None


def test_consumers_receive_the_delay_spent_upstream_and_in_the_node(node: Node) -> None:
    node.passes(400 * MS)
    node.gets("s2", 9)
    assert node.service.spent_us["merged"] == 400 * MS
    begun = node.service.begin("merged", 0)
    assert begun is not None and begun[0].spent_us == 400 * MS
    node.gets("s1", 10, spent_us=300 * MS)
    node.passes(100 * MS)
    node.gets("s2", 10)
    assert node.service.spent_us["merged"] == 400 * MS


def test_postponement_requests_of_a_peer_are_answered(node: Node) -> None:
    replies: list[Postponement] = []
    for done in (False, True):
        node.performer.take(Asked(Postpone("merged", "main@2", 1, 4, True, done), replies.append))
    assert [reply.answer for reply in replies] == ["answering", "away"]


# -- a restart ------------------------------------------------------------------------------------


def restarted(*, checkpoint_buckets: int) -> Node:
    """STABLE up to bucket 9, then restarted; no input is available after the restart."""
    node = Node(MemoryDisk(random.Random(1)), checkpoint_buckets=checkpoint_buckets)
    for stream in ("s1", "s2"):
        node.gets(stream, 9)
    node.restarts()
    return node


def test_a_node_restarted_without_one_input_resumes_its_checkpoint_within_max_delay() -> None:
    node = restarted(checkpoint_buckets=5)
    assert node.state is OutputState.STABILIZATION
    node.gets("s1", 14)
    node.passes(HELD)
    assert node.state is OutputState.UP_FAILURE
    assert node.holds() == stable(10) | tentative(10, 15)
    node.gets("s2", 14)
    assert node.holds() == stable(15)
    node.log.close()


def test_a_node_restarted_without_a_checkpoint_waits_for_its_inputs() -> None:
    node = restarted(checkpoint_buckets=0)
    node.gets("s1", 14)
    node.passes(10_000 * MS)
    assert node.runs == []
    node.gets("s2", 14)
    assert node.holds() == stable(15)
    node.log.close()


def test_a_node_killed_during_a_failure_restarts_from_its_stable_results(node: Node) -> None:
    node.passes(HELD)
    assert node.holds()[9] == ("TENTATIVE", 1)
    node.restarts()
    assert node.holds() == stable(5)
    assert node.log.info("merged").undos == 1
    for stream in ("s1", "s2"):
        node.gets(stream, 9)
    assert node.holds() == stable(10)


def test_a_restarted_node_refuses_an_older_copy_of_the_log_of_a_source() -> None:
    node = Node(MemoryDisk(random.Random(1)))
    for stream in ("s1", "s2"):
        node.gets(stream, 4)
    node.restarts()
    node.gets("s1", 4)
    with pytest.raises(RolledBack, match=r"'s2': its log ends at bucket 3, .* received bucket 4"):
        node.gets("s2", 3)
    node.log.close()
