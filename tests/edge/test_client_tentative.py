"""What an application gets during a failure and after it (Borealis sections 3.1, 3.4.2). No JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.core.subscription import Begin, Connect, Delivered, Subscription, Take, Taken
from holdfast.edge.client import BucketInfo, Client
from holdfast.storage import Added, Boundary, Ended, Log, Record, Tentative
from holdfast.streams.serving import Service
from holdfast.streams.subscription_events import selected
from holdfast.transport.in_process import InProcess
from holdfast.types import SegmentId, Stability

WIDTH = 1_000
SCHEMA = "ts timestamp, value bigint"


class Stream:
    """An output as the node that makes it writes it."""

    def __init__(self, root: Path) -> None:
        self._root = root / "node"
        self.start()

    def start(self) -> None:
        self.log = Log.open(self._root, "node", fsync="never")
        self.log.open_stream("s", SCHEMA, "ts", 0)
        self.service = Service(logs={"s": self.log}, heartbeat_s=0.01)

    def restarts(self) -> None:
        """A crash: what was tentative is gone from the node's log."""
        self.log.close()
        self.start()

    def stable(self, upto: int, *with_rows: int, then: tuple[Record, ...] = ()) -> None:
        version = self.log.info("s").undos + 1
        added = [self._added(b, Stability.STABLE, version) for b in with_rows]
        replaced, _ = self.log.tentative("s", upto=upto)
        self.log.append(*added, Boundary("s", upto), *then)
        self.log.discard(replaced)

    def tentative(
        self, since: int, upto: int, *with_rows: int, shares: tuple[float, float] = (0.5, 0.25)
    ) -> None:
        added = [self._added(b, Stability.TENTATIVE, self.log.info("s").undos) for b in with_rows]
        self.log.append(*added, Tentative("s", since, upto, ("s2",), *shares))

    def _added(self, bucket: int, stability: Stability, version: int) -> Added:
        sign = 1 if stability is Stability.STABLE else -1
        times = pa.array([bucket * WIDTH], pa.timestamp("us", "UTC"))
        table = pa.table({"ts": times, "value": pa.array([sign * bucket], pa.int64())})
        return Added(self.log.write(table, SegmentId("s", 0, bucket, version), stability))


class Application:
    """A client and what it was given, delivery by delivery over one connection."""

    def __init__(self, stream: Stream, client: Client) -> None:
        self.stream, self.client = stream, client
        client.advanced = lambda position: stream.service.acknowledge("s", "client-s", *position)
        self._subscription: Subscription | None = None

    def gets(self) -> Iterator[tuple[pa.Table, BucketInfo]]:
        """What there is by now, in the order it is given."""
        if self._subscription is None:
            self._subscription = self.client.subscription(("node",))
            (connect,) = self._subscription.handle(Begin(0))
            assert isinstance(connect, Connect)
            begun = self.stream.service.begin("s", connect.from_bucket, connect.tentative_after)
            assert begun is not None
            delivery, self._cursor = begun
            self._connection = connect.connection
        else:
            delivery = self.stream.service.next("s", self._cursor)
        came = Delivered(
            0, self._connection, delivery.epoch, delivery.since, delivery.upto, delivery.state
        )
        take = self._subscription.handle(came)[-1]
        assert isinstance(take, Take)
        part = selected(delivery, take)
        yield from self.client.take(part)
        self._subscription.handle(Taken(0, part.upto, part.tentative_upto, part.ended))

    def takes(self) -> list[str]:
        return [spelled(table, info) for table, info in self.gets()]

    def reconnects(self) -> None:
        self._subscription = None


def spelled(table: pa.Table, info: BucketInfo) -> str:
    """`3!`: in place of what was given before."""
    assert table.num_rows == info.rows
    if info.rec_done:
        assert info.rows == 0 and not info.replaces
        return f"REC_DONE {info.bucket}"
    place = f"{info.bucket}!" if info.replaces else f"{info.bucket}"
    if not info.rows:
        assert info.stability is Stability.STABLE
        return f"EMPTY {place}"
    tentative = info.stability is Stability.TENTATIVE
    assert table["value"].to_pylist() == [-info.bucket if tentative else info.bucket]
    assert (info.missing == ("s2",)) == tentative
    assert (info.inputs_share < 1.0) == (info.rows_share < 1.0) == tentative
    return f"{info.stability.value} {place}"


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(tmp_path)
    yield stream
    stream.log.close()


@pytest.fixture
def app(stream: Stream) -> Application:
    return Application(stream, Client("s", {}, WIDTH, tentative=True))


class Restarting:
    """A client with a log, again and again."""

    def __init__(self, root: Path, stream: Stream, *, archive: bool = False) -> None:
        self._root, self.stream, self._archive = root / "client", stream, archive
        self.start()

    def start(self) -> None:
        self.log = Log.open(self._root, "client-s", fsync="never", archive=self._archive)
        client = Client("s", {}, WIDTH, log=self.log, tentative=True)
        self.app = Application(self.stream, client)

    def restarts(self) -> None:
        self.log.close()
        self.start()

    @property
    def client(self) -> Client:
        return self.app.client

    def takes(self) -> list[str]:
        return self.app.takes()


@pytest.fixture
def restarting(tmp_path: Path, stream: Stream) -> Iterator[Restarting]:
    restarting = Restarting(tmp_path, stream)
    yield restarting
    restarting.log.close()


# -- a tentative bucket stands until its own stable version is there ------------------------------


def test_figure_3_stable_tentative_and_corrections_in_their_place(
    stream: Stream, app: Application
) -> None:
    stream.stable(2, 1, 2)
    assert app.takes() == ["STABLE 1", "STABLE 2"]
    stream.tentative(3, 5, 3, 4, 5)
    assert app.takes() == ["TENTATIVE 3", "TENTATIVE 4", "TENTATIVE 5"]
    stream.stable(4, 3, 4)
    assert app.takes() == ["STABLE 3!", "STABLE 4!"]
    stream.stable(6, 5, 6)
    assert app.takes() == ["STABLE 5!", "STABLE 6", "REC_DONE 6"]


def test_stable_news_of_bucket_2_leave_tentative_bucket_6_alone(
    stream: Stream, app: Application
) -> None:
    stream.stable(1, 1)
    stream.tentative(2, 6, 2, 6)
    assert app.takes() == ["STABLE 1", "TENTATIVE 2", "TENTATIVE 6"]
    stream.stable(2, 2)
    assert app.takes() == ["STABLE 2!"]
    assert (app.client.position, app.client.known_upto) == (2, 6)
    assert app.takes() == [], "nor is it given a second time"


def test_one_failure_costs_no_undo_however_long_its_correction_takes(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    app.takes()
    stood = []
    for bucket in range(1, 61):
        stream.tentative(bucket, bucket, bucket)
        assert app.takes() == [f"TENTATIVE {bucket}"]
    for bucket in range(1, 61):  # corrected one by one, and new ones come meanwhile
        stream.stable(bucket, bucket)
        stream.tentative(60 + bucket, 60 + bucket, 60 + bucket)
        assert app.takes() == [f"STABLE {bucket}!", f"TENTATIVE {60 + bucket}"]
        stood.append(app.client.known_upto)
    assert stood == list(range(61, 121)), "the newest standing result never goes back"
    stream.stable(120, *range(61, 121))
    assert app.takes()[-1] == "REC_DONE 120"
    client = app.client
    assert (client.replacements, client.tentative_rows) == (120, 120)


def test_an_empty_stable_bucket_replaces_a_tentative_one_too(
    stream: Stream, app: Application
) -> None:
    """The rows that were guessed were wrong: there are none."""
    stream.tentative(0, 4, 1, 2, 4)
    assert app.takes() == ["TENTATIVE 1", "TENTATIVE 2", "TENTATIVE 4"]
    stream.stable(3, 2, 3)
    assert app.takes() == ["EMPTY 1!", "STABLE 2!", "STABLE 3"]
    stream.stable(4)
    assert app.takes() == ["EMPTY 4!", "REC_DONE 4"]
    assert app.client.replacements == 3


def test_of_tentative_buckets_without_rows_there_is_nothing_to_replace(
    stream: Stream, app: Application
) -> None:
    """The application was told nothing of them but how far the output is."""
    stream.stable(0, 0)
    stream.tentative(1, 3)
    assert app.takes() == ["STABLE 0"]
    assert app.client.known_upto == 3
    stream.stable(1)
    assert app.takes() == []
    stream.stable(3, 2)
    assert app.takes() == ["STABLE 2", "REC_DONE 3"]


def test_one_delivery_is_taken_in_the_order_stable_rec_done_tentative(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 2)
    app.takes()
    # All of this before the client looks again: the failure is corrected, and the next one is here.
    stream.stable(2, 2)
    stream.tentative(3, 4, 3, 4)
    assert app.takes() == ["STABLE 2!", "REC_DONE 2", "TENTATIVE 3", "TENTATIVE 4"]


def test_rec_done_waits_for_the_last_bucket_that_was_given_as_tentative(
    stream: Stream, app: Application
) -> None:
    """It is the client's own conclusion, whatever replica the corrections come from."""
    stream.tentative(0, 2, 0, 2)
    app.takes()
    stream.stable(1, 0)
    assert app.takes() == ["STABLE 0!"]
    stream.tentative(3, 3, 3)
    assert app.takes() == ["TENTATIVE 3"]
    stream.stable(2, 2)
    assert app.takes() == ["STABLE 2!"], "bucket 3 still stands"
    stream.stable(3, 3)
    assert app.takes() == ["STABLE 3!", "REC_DONE 3"]


def test_who_was_given_nothing_tentative_is_told_of_no_failure(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    app.takes()
    stream.tentative(1, 1, 1)
    stream.stable(1, 1)  # before the client looked
    assert app.takes() == ["STABLE 1"]
    assert app.client.replacements == 0


def test_a_tentative_bucket_says_how_partial_it_is(stream: Stream, app: Application) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 1, 1, shares=(0.75, 0.9))
    shares = {i.bucket: (i.inputs_share, i.rows_share) for _, i in app.gets()}
    assert shares == {0: (1.0, 1.0), 1: (0.75, 0.9)}
    # Each its own, also where several are new; those that are not alike come one after the other.
    stream.tentative(2, 2, 2, shares=(0.5, 0.8))
    stream.tentative(3, 3, 3, shares=(0.75, 0.3))
    for bucket, share in ((2, (0.5, 0.8)), (3, (0.75, 0.3))):
        ((_, info),) = app.gets()
        assert (info.bucket, info.inputs_share, info.rows_share) == (bucket, *share)


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
    assert (client.known_upto, client.position, client.tentative_upto) == (3, 1, 3)
    stream.stable(3, 3)
    app.takes()
    assert (client.known_upto, client.position, client.tentative_upto) == (3, 3, None)
    assert (client.tentative_rows, client.replacements) == (1, 1)


# -- producers that come and go -------------------------------------------------------------------


def test_a_node_that_is_restarted_in_a_failure_takes_nothing_from_its_readers(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    app.takes()
    stream.restarts()
    app.reconnects()
    assert app.takes() == []
    assert app.client.known_upto == 2
    stream.tentative(1, 3, 1, 2, 3)  # its next instance guesses from the start
    assert app.takes() == ["TENTATIVE 3"]
    stream.stable(3, 1, 3)
    assert app.takes() == ["STABLE 1!", "EMPTY 2!", "STABLE 3!", "REC_DONE 3"]


def test_property_2_2_stable_news_of_another_replica_replace_what_this_one_guessed(
    stream: Stream, app: Application
) -> None:
    """Whoever is followed now may never have given anything tentative."""
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    app.takes()
    stream.stable(1, 1)
    app.reconnects()
    assert app.takes() == ["STABLE 1!"]


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
    assert app.takes() == ["STABLE 1"]
    stream.stable(2)
    assert app.takes() == []
    client = app.client
    assert (client.known_upto, client.tentative_rows, client.replacements) == (2, 0, 0)


# -- a client that is restarted -------------------------------------------------------------------


def test_restarted_in_a_failure_it_gives_again_what_stands_in_place_of_it(
    stream: Stream, restarting: Restarting
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 3, 1, 2, 3)
    assert restarting.takes() == ["STABLE 0", "TENTATIVE 1", "TENTATIVE 2", "TENTATIVE 3"]
    stream.stable(1, 1)
    restarting.restarts()
    assert restarting.client.known_upto == 3, "the application has them"
    assert restarting.takes() == ["STABLE 1!", "TENTATIVE 2!", "TENTATIVE 3!"]
    stream.stable(3, 3)
    assert restarting.takes() == ["EMPTY 2!", "STABLE 3!", "REC_DONE 3"]


def test_restarted_twice_in_a_failure_it_does_so_each_time(
    stream: Stream, restarting: Restarting
) -> None:
    stream.tentative(0, 1, 0, 1)
    restarting.takes()
    for _ in range(2):
        restarting.restarts()
        assert restarting.takes() == ["TENTATIVE 0!", "TENTATIVE 1!"]
    stream.tentative(2, 2, 2)
    assert restarting.takes() == ["TENTATIVE 2"], "this one is new"


def test_restarted_after_the_failure_was_corrected_meanwhile_it_replaces_all_of_it(
    stream: Stream, restarting: Restarting
) -> None:
    """What it gave as tentative and is empty now would otherwise stand for ever."""
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    restarting.takes()
    stream.stable(3, 2)
    restarting.restarts()
    assert restarting.takes() == ["EMPTY 1!", "STABLE 2!", "REC_DONE 3"]
    restarting.restarts()
    stream.stable(4, 4)
    assert restarting.takes() == ["STABLE 4"], "nothing tentative stood any more"


def test_restarted_it_goes_on_beyond_what_stood(stream: Stream, restarting: Restarting) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    restarting.takes()
    restarting.restarts()
    stream.stable(1, 1)
    stream.stable(4, 3)
    assert restarting.takes() == ["STABLE 1!", "EMPTY 2!", "STABLE 3", "REC_DONE 4"]


def test_restarted_while_nothing_tentative_stood_it_says_nothing(
    stream: Stream, restarting: Restarting
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    restarting.takes()
    stream.stable(2, 1)
    assert restarting.takes()[-1] == "REC_DONE 2"
    restarting.restarts()
    stream.stable(3, 3)
    assert restarting.takes() == ["STABLE 3"]


def test_killed_in_the_middle_of_a_delivery_it_knows_that_something_tentative_was_given(
    stream: Stream, restarting: Restarting
) -> None:
    stream.tentative(0, 2, 0, 1, 2)
    next(restarting.app.gets())  # the application has bucket 0 when the process dies
    restarting.restarts()
    assert restarting.takes() == ["TENTATIVE 0!", "TENTATIVE 1!", "TENTATIVE 2!"]


def test_what_is_tentative_is_neither_durable_nor_acknowledged(
    stream: Stream, tmp_path: Path
) -> None:
    """Applications that restart have lost it, and are given it again."""
    restarting = Restarting(tmp_path, stream, archive=True)
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    restarting.takes()
    assert restarting.log.info("s").complete_upto == 0
    assert [segment.id.bucket for segment in restarting.log.segments("s", 0, 9)] == [0]
    assert stream.log.received("s") == stream.log.trimmable("s") == 0
    restarting.restarts()
    assert restarting.takes() == ["TENTATIVE 1!", "TENTATIVE 2!"]
    stream.stable(2, 1)
    restarting.takes()
    assert [segment.id.bucket for segment in restarting.log.segments("s", 0, 9)] == [0, 1]
    restarting.log.close()


def test_how_much_was_tentative_and_replaced_survives(
    stream: Stream, restarting: Restarting
) -> None:
    stream.tentative(0, 1, 0, 1)
    restarting.takes()
    stream.stable(1, 1)
    restarting.takes()
    restarting.restarts()
    client = restarting.client
    assert (client.tentative_rows, client.replacements) == (2, 2)


def test_iterating_gives_the_same_as_taking(stream: Stream) -> None:
    """The loop around connections adds nothing, and ends with the output."""
    client = Client("s", {"node": lambda: InProcess(stream.service)}, WIDTH, tentative=True)
    stream.stable(0, 0)
    stream.tentative(1, 2, 1)
    told = []
    for table, info in client:
        told.append(spelled(table, info))
        if told[-1] == "TENTATIVE 1":
            stream.stable(2, 1, then=(Ended("s"),))
    assert told == ["STABLE 0", "TENTATIVE 1", "STABLE 1!", "REC_DONE 2"]
    assert client.ended
