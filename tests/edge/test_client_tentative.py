"""What an application gets during a failure and after it (Borealis sections 3.1, 3.4.2). No JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.edge.client import BucketInfo, Client
from holdfast.edge.sinks import CorrectedTable
from holdfast.storage import Added, Boundary, Ended, Log, RecDone, Record, Tentative, Undo
from holdfast.streams.delivery import Cursor
from holdfast.streams.serving import Service
from holdfast.streams.subscribing import fresh
from holdfast.transport.in_process import InProcess
from holdfast.types import SegmentId, Stability

WIDTH = 1_000
SCHEMA = "ts timestamp, value bigint"


class Stream:
    """An output as the node that makes it writes it."""

    def __init__(self, root: Path) -> None:
        self.log = Log.open(root / "node", "node", fsync="never")
        self.log.open_stream("s", SCHEMA, "ts", 0)
        self.service = Service(logs={"s": self.log}, heartbeat_s=0.01)

    def stable(self, upto: int, *with_rows: int, then: tuple[Record, ...] = ()) -> None:
        info = self.log.info("s")
        undone, spans = self.log.tentative("s")
        undo = [Undo("s", info.complete_upto, info.undos + 1)] if spans else []
        added = [self._added(b, Stability.STABLE, info.undos + len(undo)) for b in with_rows]
        self.log.append(*undo, *added, Boundary("s", upto), *then)
        self.log.discard(undone)

    def tentative(self, since: int, upto: int, *with_rows: int) -> None:
        added = [self._added(b, Stability.TENTATIVE, self.log.info("s").undos) for b in with_rows]
        self.log.append(*added, Tentative("s", since, upto, ("s2",)))

    def undo(self) -> None:
        info = self.log.info("s")
        self.log.append(Undo("s", info.complete_upto, info.undos + 1))

    def rec_done(self) -> None:
        info = self.log.info("s")
        self.log.append(RecDone("s", info.complete_upto, info.rec_dones + 1))

    def _added(self, bucket: int, stability: Stability, version: int) -> Added:
        sign = 1 if stability is Stability.STABLE else -1
        times = pa.array([bucket * WIDTH], pa.timestamp("us", "UTC"))
        table = pa.table({"ts": times, "value": pa.array([sign * bucket], pa.int64())})
        return Added(self.log.write(table, SegmentId("s", 0, bucket, version), stability))


class Application:
    """A client and what it was given, delivery by delivery over one connection."""

    def __init__(self, stream: Stream, client: Client) -> None:
        self.stream, self.client = stream, client
        self._cursor: Cursor | None = None

    def takes(self) -> list[str]:
        """What there is by now, in the order it is given."""
        service, following = self.stream.service, self.client.following
        if self._cursor is None:
            begun = service.begin("s", following.at, following.tentative_after)
            assert begun is not None
            delivery, self._cursor = begun
        else:
            delivery = service.next("s", self._cursor)
        return [
            spelled(table, info) for table, info in self.client.take(fresh(following, delivery))
        ]

    def reconnects(self) -> None:
        self._cursor = None


def spelled(table: pa.Table, info: BucketInfo) -> str:
    if info.undo or info.rec_done:
        assert table.num_rows == info.rows == 0
        return f"{'UNDO' if info.undo else 'REC_DONE'} {info.bucket}"
    assert table["value"].to_pylist() == [
        info.bucket if info.stability is Stability.STABLE else -info.bucket
    ]
    assert (info.missing == ("s2",)) == (info.stability is Stability.TENTATIVE)
    return f"{info.stability.value} {info.bucket}"


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(tmp_path)
    yield stream
    stream.log.close()


@pytest.fixture
def app(stream: Stream) -> Application:
    return Application(stream, Client("s", {}, WIDTH, tentative=True))


def test_figure_3_stable_tentative_undo_and_corrections(stream: Stream, app: Application) -> None:
    stream.stable(2, 1, 2)
    assert app.takes() == ["STABLE 1", "STABLE 2"]
    stream.tentative(3, 5, 3, 4, 5)
    assert app.takes() == ["TENTATIVE 3", "TENTATIVE 4", "TENTATIVE 5"]
    stream.stable(4, 3, 4)
    assert app.takes() == ["UNDO 2", "STABLE 3", "STABLE 4"]


def test_one_delivery_is_taken_in_the_order_undo_stable_rec_done_tentative(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 3, 2, 3)
    app.takes()
    # All of this before the client looks again: the failure is corrected, and the next one is here.
    stream.stable(2, 2, then=(RecDone("s", 2, 1),))
    stream.tentative(3, 4, 3, 4)
    assert app.takes() == ["UNDO 0", "STABLE 2", "REC_DONE 2", "TENTATIVE 3", "TENTATIVE 4"]


def test_an_undo_alone_says_what_still_stands(stream: Stream, app: Application) -> None:
    stream.tentative(0, 1, 1)
    assert app.takes() == ["TENTATIVE 1"]
    stream.undo()
    assert app.takes() == ["UNDO -1"]
    stream.tentative(0, 1, 1)
    assert app.takes() == ["TENTATIVE 1"]  # another guess


def test_who_has_nothing_tentative_is_told_of_no_undo(stream: Stream, app: Application) -> None:
    stream.stable(0, 0)
    app.takes()
    stream.tentative(1, 1, 1)
    stream.stable(1, 1)  # before the client looked
    assert app.takes() == ["STABLE 1"]
    assert app.client.undos == 0


def test_tentative_buckets_without_rows_are_taken_back_too(
    stream: Stream, app: Application
) -> None:
    """The application was told nothing of them but how far the output is."""
    stream.stable(0, 0)
    stream.tentative(1, 2)
    assert app.takes() == ["STABLE 0"]
    assert app.client.known_upto == 2
    stream.stable(2)
    assert app.takes() == ["UNDO 0"]


def test_counters_and_how_far_the_application_knows_the_output(
    stream: Stream, app: Application
) -> None:
    client = app.client
    assert client.known_upto is None
    stream.stable(0, 0)
    app.takes()
    assert (client.known_upto, client.position, client.tentative_upto) == (0, 0, None)
    stream.tentative(1, 3, 2)
    app.takes()
    assert (client.known_upto, client.position, client.tentative_upto) == (3, 0, 3)
    stream.stable(1)
    app.takes()
    assert (client.known_upto, client.position, client.tentative_upto) == (1, 1, None)
    assert (client.tentative_rows, client.undos) == (1, 1)
    stream.tentative(2, 2, 2)
    app.takes()
    assert (client.known_upto, client.tentative_rows, client.undos) == (2, 2, 1)


def test_property_2_2_stable_news_of_another_replica_take_back_without_its_undo(
    stream: Stream, app: Application
) -> None:
    """Whoever is followed now never gave anything tentative, so it has nothing to undo."""
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    app.takes()
    stream.stable(1, 1)
    app.reconnects()  # a new connection says nothing of what was undone before it
    assert app.takes() == ["UNDO 0", "STABLE 1"]


def test_property_2_3_over_a_new_connection_only_what_is_younger_comes(
    stream: Stream, app: Application
) -> None:
    stream.tentative(0, 1, 0, 1)
    app.takes()
    stream.tentative(2, 2, 2)
    app.reconnects()
    assert app.takes() == ["TENTATIVE 2"]


def test_3_1_who_does_not_tolerate_inconsistency_sees_nothing_of_it(stream: Stream) -> None:
    app = Application(stream, Client("s", {}, WIDTH))
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    assert app.takes() == ["STABLE 0"]
    stream.stable(1, 1)
    stream.rec_done()
    stream.tentative(2, 2, 2)
    assert app.takes() == ["STABLE 1"]
    stream.undo()
    assert app.takes() == []
    client = app.client
    assert (client.known_upto, client.tentative_rows, client.undos) == (1, 0, 0)


def test_what_is_tentative_is_neither_durable_nor_acknowledged(
    stream: Stream, tmp_path: Path
) -> None:
    """Applications that restart have lost it, and are given it again."""
    receipts = Log.open(tmp_path / "client", "client-s", fsync="never", archive=True)
    client = Client("s", {}, WIDTH, log=receipts, tentative=True)
    client.peer = InProcess(stream.service)
    app = Application(stream, client)
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    app.takes()
    assert receipts.info("s").complete_upto == 0
    assert [segment.id.bucket for segment in receipts.segments("s", 0, 9)] == [0]
    assert stream.log.received("s") == stream.log.trimmable("s") == 0
    receipts.close()

    receipts = Log.open(tmp_path / "client", "client-s", fsync="never", archive=True)
    app = Application(stream, Client("s", {}, WIDTH, log=receipts, tentative=True))
    assert app.client.known_upto == 0
    assert app.takes() == ["TENTATIVE 1", "TENTATIVE 2"]
    stream.stable(2, 1)
    assert app.takes() == ["UNDO 0", "STABLE 1"]
    assert [segment.id.bucket for segment in receipts.segments("s", 0, 9)] == [0, 1]
    receipts.close()


def test_how_often_things_were_taken_back_survives(stream: Stream, tmp_path: Path) -> None:
    receipts = Log.open(tmp_path / "client", "client-s", fsync="never")
    app = Application(stream, Client("s", {}, WIDTH, log=receipts, tentative=True))
    stream.tentative(0, 1, 0, 1)
    app.takes()
    stream.stable(1, 1)
    app.takes()
    receipts.close()
    receipts = Log.open(tmp_path / "client", "client-s", fsync="never")
    client = Client("s", {}, WIDTH, log=receipts, tentative=True)
    assert (client.tentative_rows, client.undos) == (2, 1)
    receipts.close()


def test_iterating_gives_the_same_as_taking(stream: Stream) -> None:
    """The loop around connections adds nothing, and ends with the output."""
    client = Client("s", {"node": lambda: InProcess(stream.service)}, WIDTH, tentative=True)
    stream.stable(0, 0)
    stream.tentative(1, 2, 1)
    told = []
    for table, info in client:
        told.append(spelled(table, info))
        if told[-1] == "TENTATIVE 1":
            stream.stable(2, 1, then=(RecDone("s", 2, 1), Ended("s")))
    assert told == ["STABLE 0", "TENTATIVE 1", "UNDO 0", "STABLE 1", "REC_DONE 2"]
    assert client.ended


def test_a_corrected_table_holds_the_best_there_is(stream: Stream, tmp_path: Path) -> None:
    table = CorrectedTable(str(tmp_path / "table"))
    client = Client("s", {}, WIDTH, tentative=table.tentative)
    cursor: Cursor | None = None

    def held() -> list[tuple[int, str]]:
        nonlocal cursor
        if cursor is None:
            begun = stream.service.begin("s", 0, client.following.tentative_after)
            assert begun is not None
            delivery, cursor = begun
        else:
            delivery = stream.service.next("s", cursor)
        for given in client.take(fresh(client.following, delivery)):
            table(*given)
        found = table.read()
        return list(zip(*(found[c].to_pylist() for c in ("value", "_stability")), strict=True))

    stream.stable(1, 1)
    stream.tentative(2, 3, 2, 3)
    assert held() == [(1, "STABLE"), (-2, "TENTATIVE"), (-3, "TENTATIVE")]
    stream.stable(2, 2)
    assert held() == [(1, "STABLE"), (2, "STABLE")]
    stream.rec_done()
    assert held() == [(1, "STABLE"), (2, "STABLE")]
