"""A node without Spark and without threads: the real `Performer`, log, engine and state; only the
jobs of the engine are computed in Arrow. A scenario decides when anything happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.engine.inputs import InputFile
from holdfast.engine.state import Version, files_below, write_rows
from holdfast.errors import StorageFull
from holdfast.model.fragments import fragments
from holdfast.model.network import Network
from holdfast.node.executor import Performer
from holdfast.node.input_index import InputIndex
from holdfast.node.node_events import Event, Finished, Flushed, Work
from holdfast.storage import Log
from holdfast.streams.delivery import Delivery
from holdfast.streams.serving import Service
from holdfast.types import Segment, SegmentId, Stability, StreamInfo
from holdfast.verify.sim.simulated_disk import Crashed
from tests.node.crashing_disk import CrashingDisk
from tests.node.small_engine import DDL, SmallEngine

#: How long it takes to open a log.
OPENING_US = 70_000

# -- inputs ---------------------------------------------------------------------------------------


class Upstream:
    """The sources. They delete buckets as soon as the node has released them."""

    def __init__(self, tables: dict[str, dict[int, pa.Table]], buckets: int) -> None:
        self.tables, self.buckets = tables, buckets
        #: Last bucket that was deleted, by stream.
        self.trimmed = dict.fromkeys(tables, -1)
        self.produced = dict.fromkeys(tables, -1)
        #: All buckets are there, and no more will follow.
        self.has_ended = False

    def rows(self, lo: int, hi: int) -> int:
        """The number of rows of the buckets lo..hi."""
        return sum(t.num_rows for held in self.tables.values() for b, t in held.items()
                   if lo <= b <= hi)  # fmt: skip

    def delivery(self, stream: str, since: int, upto: int, *, opens: bool) -> Delivery:
        trimmed = self.trimmed[stream]
        assert since > trimmed, f"{stream} from bucket {since}, deleted up to {trimmed}"
        upto = self.buckets - 1 if self.has_ended else upto
        held = {b: t for b, t in self.tables[stream].items() if since <= b <= upto}
        made = self.produced[stream] = max(upto, self.produced[stream])
        info = StreamInfo(stream, DDL, "ts", 0, made, trimmed, 1, ended=self.has_ended)
        segments = tuple(
            Segment(SegmentId(stream, 0, b), Stability.STABLE, "", t.num_rows, "", 0, 1, 1)
            for b, t in held.items()
        )
        return Delivery(
            stream, since, upto, 1, segments, tables=tuple(held.values()),
            info=info if opens else None, ended=self.has_ended,
        )  # fmt: skip

    def files(self, stream: str, folder: Path) -> list[InputFile]:
        """All rows as files, for an engine without a node."""
        files = []
        for bucket, table in self.tables[stream].items():
            path = str(folder / f"{stream}.{bucket}.parquet")
            files.append(InputFile(bucket, path, table.num_rows, write_rows(table, path)))
        return files


# -- the node -------------------------------------------------------------------------------------


class SmallNode:
    """A performer and its carrier. Steps, checkpoints and merges are under way until the scenario
    ends them, in any order."""

    def __init__(
        self, root: Path, network: Callable[[], Network], upstream: Upstream, rng: random.Random,
        options: Options | None = None,
    ) -> None:  # fmt: skip
        self.root, self.network, self.upstream, self.rng = root, network, upstream, rng
        self.options = options or Options(checkpoint_buckets=0, group_buckets_max=4)
        self.disk = CrashingDisk(root, rng)
        self.now = 0
        self.start()

    def start(self) -> None:
        network = self.network()
        (fragment,) = fragments(network)
        (self.path,) = fragment.paths
        self._posted: list[tuple[int, Event]] = []
        self.works: list[tuple[Work, Version]] = []
        self.flushes: list[tuple[Version, tuple[float, ...]]] = []
        #: Steps and checkpoints that have ended without the performer knowing.
        self.ended: list[Finished | Flushed] = []
        ticks = iter((0, OPENING_US))
        self.log = Log.open(
            self.root, "main", fsync="always", disk=self.disk, clock=lambda: next(ticks)
        )
        self.engine = SmallEngine(network, self.root / "state", self.disk)
        self.performer = Performer(
            "main", fragment, self.engine, self.log, Service(), self, self.options,
            inputs=InputIndex(str(self.root / "inputs")), clock=lambda: self.now,
        )  # fmt: skip
        self.performer.take(core.Began(self.now))
        self._received: dict[str, int] = {}
        for stream in self.upstream.tables:
            wanted = self.performer.wanted(stream)
            since = self.upstream.trimmed[stream] + 1 if wanted is None else wanted
            self._receive(stream, since, since - 1, opens=True)
        self._settle()

    def crash(self, *, power: bool, dies_again: int | None = None) -> None:
        """The process dies, or the whole machine, and starts again. `dies_again`: and dies in this
        change while it starts."""
        self.dies(power=power)
        self.disk.crash_after = dies_again
        while True:
            try:
                self.start()
                return
            except Crashed:
                self.dies(power=power)

    def dies(self, *, power: bool) -> None:
        if self.engine.is_merging:
            self.engine.merges()  # its file is written, and nobody knows it
        self.disk.crash(power=power)

    # -- carrier --------------------------------------------------------------------------------

    def run(self, work: Work, version: Version) -> None:
        self.works.append((work, version))

    def flush(self, version: Version, costs: tuple[float, ...]) -> None:
        self.flushes.append((version, costs))

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        self.upstream.trimmed[stream] = max(self.upstream.trimmed[stream], needed)

    def post(self, event: Event, after_s: float = 0.0) -> None:
        self._posted.append((self.now + round(1e6 * after_s), event))

    def ask(self, asked: Any, peers: tuple[str, ...]) -> None:
        raise AssertionError("there are no peers")

    def compare_inputs(self, path: str, stream: str) -> None:
        raise AssertionError("there are no peers")

    # -- what may happen next -------------------------------------------------------------------

    def gets(self, buckets: int) -> None:
        """The next buckets of all inputs arrive."""
        for stream, upto in list(self._received.items()):
            self._receive(stream, upto + 1, min(upto + buckets, self.upstream.buckets - 1))
        self._settle()

    def _receive(self, stream: str, since: int, upto: int, *, opens: bool = False) -> None:
        if opens or since <= upto:
            delivery = self.upstream.delivery(stream, since, upto, opens=opens)
            self._received[stream] = delivery.upto
            self.performer.receive(delivery)

    def steps(self) -> None:
        """The step under way ends, without the performer knowing."""
        (work, version), *self.works = self.works
        try:
            finished = Finished(work, self.performer.step(work, version))
        except Exception as err:
            finished = Finished(work, None, error=err)
        self.ended.append(finished)

    def writes(self) -> None:
        """The checkpoint under way is written, without the performer knowing."""
        (version, costs), *self.flushes = self.flushes
        try:
            flushed = Flushed(version, self.performer.flush(version, costs))
        except Exception as err:
            flushed = Flushed(version, error=err)
        self.ended.append(flushed)

    def hears(self) -> None:
        """The performer notices what has ended."""
        event, *self.ended = self.ended
        self.performer.take(event)
        self._settle()

    def passes(self, us: int) -> None:
        self.now += us
        self._settle()

    def _settle(self) -> None:
        while due := [event for at, event in self._posted if at <= self.now]:
            self._posted = [(at, event) for at, event in self._posted if at > self.now]
            for event in due:
                self.performer.take(event)

    def possible(self) -> list[Callable[[], None]]:
        """What may happen next. Checkpoints and merges take longer than steps."""
        moves: list[Callable[[], None]] = []
        if min(self._received.values()) < self.upstream.buckets - 1:
            moves += [lambda: self.gets(self.rng.choice([1, 1, 1, 3]))] * 4
        if self.works:
            moves += [self.steps] * 8
        if self.flushes:
            moves.append(self.writes)
        if self.ended:
            moves += [self.hears] * 8
        if self.engine.is_merging:
            moves.append(self.engine.merges)
        return moves

    def move(self) -> None:
        """Something that is possible happens."""
        moves = self.possible()
        if moves:
            self.rng.choice(moves)()
        self.passes(50_000 if moves else 1_000_000)

    def ends(self) -> None:
        """Everything that is possible happens, until nothing is left."""
        self.disk.full = False
        while not self.is_complete or self.possible():
            self.move()

    def commits(self, buckets: int, *, flushes: bool = True) -> None:
        """The next buckets arrive and are computed; checkpoints are written at once, or not."""
        self.gets(buckets)
        while self.works or self.ended or (flushes and self.flushes):
            (self.hears if self.ended else self.steps if self.works else self.writes)()
            self.passes(50_000)

    # -- what is there --------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        last = self.upstream.buckets - 1
        return all(self.logged_upto(output) == last for output in self.path.outputs)

    def logged_upto(self, output: str) -> int:
        return self.log.info(output).complete_upto

    @property
    def version(self) -> Version:
        return self.performer.versions[self.path.name]

    @property
    def record(self) -> Version | None:
        """The newest durable version."""
        return self.performer.checkpoints.newest.get(self.path.name)

    def results(self) -> dict[str, dict[int, list[str]]]:
        """The rows of each bucket of each output. A bucket has one segment."""
        found: dict[str, dict[int, list[str]]] = {}
        for output in self.path.outputs:
            segments = self.log.segments(output, 0, self.logged_upto(output))
            tables = {segment.id.bucket: self.log.read(segment) for segment in segments}
            assert len(tables) == len(segments), "a bucket is logged twice"
            found[output] = {bucket: plain(table) for bucket, table in tables.items()}
        return found

    def state_files(self) -> set[str]:
        return files_below(str(self.root / "state"))

    def files_named(self) -> set[str]:
        """The files that the node may still use: of versions, and of merges."""
        checkpoints = self.performer.checkpoints
        held = [self.version, *checkpoints.newest.values(), *checkpoints.flushing.values()]
        merges = self.engine.merging._merges.values()
        merged = {merge.result.file for merge in merges if merge.result is not None}
        return {file for version in held for file in version.files()} | merged


def plain(table: pa.Table) -> list[str]:
    return sorted(repr(row) for row in table.to_pylist())


def expected(
    network: Callable[[], Network], upstream: Upstream, folder: Path
) -> dict[str, dict[int, list[str]]]:
    """The results of all buckets in one step, without a node."""
    net = network()
    engine = SmallEngine(net, folder / "state", CrashingDisk(folder, random.Random(0)))
    ((path,),) = (fragment.paths for fragment in fragments(net))
    files = {stream: upstream.files(stream, folder) for stream in upstream.tables}

    def between(stream: str, lo: int, hi: int) -> list[InputFile]:
        return [file for file in files[stream] if lo <= file.bucket <= hi]

    inputs: Any = SimpleNamespace(files=between)
    result = engine.run(path, engine.empty(path, -1), 0, upstream.buckets - 1, inputs)
    return {
        output: {bucket: plain(table) for bucket, table in held}
        for output, held in result.outputs.items()
    }


def check_crashes(node: SmallNode, wanted: dict[str, dict[int, list[str]]]) -> None:
    """Crashes and failed steps change no result, and leave no files behind."""
    crashes = _runs_with_crashes(node)
    assert node.results() == wanted and all(wanted.values())
    assert crashes >= 1
    assert node.state_files() == node.files_named()
    node.crash(power=True)
    assert node.state_files() == (set(node.record.files()) if node.record else set())


def _runs_with_crashes(node: SmallNode) -> int:
    """Anything may happen, until all results are logged. Returns the number of crashes."""
    rng, crashes = node.rng, 0
    while not node.is_complete:
        node.engine.merging.step_max = 8  # larger merges are beside the steps
        _fails_sometimes(node)
        begun = node.record is not None or max(node.upstream.produced.values()) >= 8
        if node.disk.crash_after is None and crashes < 5 and begun:
            node.disk.crash_after = rng.randint(1, 50)
        try:
            node.move()
        except Crashed:
            dies_again = rng.randint(1, 25) if rng.random() < 0.3 else None
            node.crash(power=rng.random() < 0.7, dies_again=dies_again)
            crashes += 1
    node.disk.crash_after = None
    node.ends()
    return crashes


def _fails_sometimes(node: SmallNode) -> None:
    """The next step fails with a small chance, or the disk is full for a while."""
    node.disk.full = node.rng.random() < 0.05
    if node.rng.random() < 0.05:
        when = node.rng.choice(["results", "state"])
        node.engine.errors[when] = StorageFull("no space left")
    node.engine.runs_of_tasks = node.rng.choice([1, 1, 2])
