"""What a client delivers during and after a failure (Borealis sections 3.1, 3.4.2). No JVM."""

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
    """An output stream, written like the producing node does."""

    def __init__(self, root: Path) -> None:
        self._root = root / "node"
        self.start()

    def start(self) -> None:
        self.log = Log.open(self._root, "node", fsync="never")
        self.log.open_stream("s", SCHEMA, "ts", 0)
        self.service = Service(logs={"s": self.log}, heartbeat_s=0.01)

    def restarts(self) -> None:
        """The node crashes and restarts: its log has no tentative buckets any more."""
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
    """A client that takes one delivery after another over one connection."""

    def __init__(self, stream: Stream, client: Client) -> None:
        self.stream, self.client = stream, client
        client.advanced = lambda position: stream.service.acknowledge("s", "client-s", *position)
        self._subscription: Subscription | None = None

    def gets(self) -> Iterator[tuple[pa.Table, BucketInfo]]:
        """Everything new, in the order of delivery."""
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
    """A bucket as text; `3!` replaces an earlier version of bucket 3."""
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
    """A client with a log that is restarted repeatedly."""

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


# -- a tentative bucket remains valid until its stable version replaces it ------------------------


def test_figure_3_corrections_replace_tentative_buckets_in_order(
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


def test_stable_bucket_2_does_not_affect_tentative_bucket_6(
    stream: Stream, app: Application
) -> None:
    stream.stable(1, 1)
    stream.tentative(2, 6, 2, 6)
    assert app.takes() == ["STABLE 1", "TENTATIVE 2", "TENTATIVE 6"]
    stream.stable(2, 2)
    assert app.takes() == ["STABLE 2!"]
    assert (app.client.position, app.client.known_upto) == (2, 6)
    assert app.takes() == [], "bucket 6 is not delivered a second time"


def test_a_long_correction_replaces_each_tentative_bucket_once(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    app.takes()
    known_upto = []
    for bucket in range(1, 61):
        stream.tentative(bucket, bucket, bucket)
        assert app.takes() == [f"TENTATIVE {bucket}"]
    for bucket in range(1, 61):  # corrected one by one, while new tentative buckets arrive
        stream.stable(bucket, bucket)
        stream.tentative(60 + bucket, 60 + bucket, 60 + bucket)
        assert app.takes() == [f"STABLE {bucket}!", f"TENTATIVE {60 + bucket}"]
        known_upto.append(app.client.known_upto)
    assert known_upto == list(range(61, 121)), "the last known bucket never goes back"
    stream.stable(120, *range(61, 121))
    assert app.takes()[-1] == "REC_DONE 120"
    client = app.client
    assert (client.replacements, client.tentative_rows) == (120, 120)


def test_an_empty_stable_bucket_replaces_a_tentative_bucket(
    stream: Stream, app: Application
) -> None:
    """All tentative rows were wrong: the stable bucket has none."""
    stream.tentative(0, 4, 1, 2, 4)
    assert app.takes() == ["TENTATIVE 1", "TENTATIVE 2", "TENTATIVE 4"]
    stream.stable(3, 2, 3)
    assert app.takes() == ["EMPTY 1!", "STABLE 2!", "STABLE 3"]
    stream.stable(4)
    assert app.takes() == ["EMPTY 4!", "REC_DONE 4"]
    assert app.client.replacements == 3


def test_tentative_buckets_without_rows_are_not_replaced(stream: Stream, app: Application) -> None:
    """The application received only the position of the output."""
    stream.stable(0, 0)
    stream.tentative(1, 3)
    assert app.takes() == ["STABLE 0"]
    assert app.client.known_upto == 3
    stream.stable(1)
    assert app.takes() == []
    stream.stable(3, 2)
    assert app.takes() == ["STABLE 2", "REC_DONE 3"]


def test_one_delivery_yields_stable_buckets_then_rec_done_then_tentative_buckets(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 2)
    app.takes()
    # Before the next delivery, the failure is corrected and another one starts.
    stream.stable(2, 2)
    stream.tentative(3, 4, 3, 4)
    assert app.takes() == ["STABLE 2!", "REC_DONE 2", "TENTATIVE 3", "TENTATIVE 4"]


def test_rec_done_waits_for_the_last_bucket_delivered_as_tentative(
    stream: Stream, app: Application
) -> None:
    """The client derives REC_DONE itself, independent of the replica that sends corrections."""
    stream.tentative(0, 2, 0, 2)
    app.takes()
    stream.stable(1, 0)
    assert app.takes() == ["STABLE 0!"]
    stream.tentative(3, 3, 3)
    assert app.takes() == ["TENTATIVE 3"]
    stream.stable(2, 2)
    assert app.takes() == ["STABLE 2!"], "bucket 3 is still tentative"
    stream.stable(3, 3)
    assert app.takes() == ["STABLE 3!", "REC_DONE 3"]


def test_a_client_without_tentative_buckets_receives_no_rec_done(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    app.takes()
    stream.tentative(1, 1, 1)
    stream.stable(1, 1)  # before the next delivery
    assert app.takes() == ["STABLE 1"]
    assert app.client.replacements == 0


def test_a_tentative_bucket_carries_the_shares_of_inputs_and_rows(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 1, 1, shares=(0.75, 0.9))
    shares = {i.bucket: (i.inputs_share, i.rows_share) for _, i in app.gets()}
    assert shares == {0: (1.0, 1.0), 1: (0.75, 0.9)}
    # Each bucket has its own shares; buckets with different shares arrive in separate deliveries.
    stream.tentative(2, 2, 2, shares=(0.5, 0.8))
    stream.tentative(3, 3, 3, shares=(0.75, 0.3))
    for bucket, share in ((2, (0.5, 0.8)), (3, (0.75, 0.3))):
        ((_, info),) = app.gets()
        assert (info.bucket, info.inputs_share, info.rows_share) == (bucket, *share)


def test_a_client_counts_tentative_rows_and_tracks_its_positions(
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


# -- producers that restart or are replaced -------------------------------------------------------


def test_a_node_restarted_during_a_failure_does_not_revoke_delivered_buckets(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    app.takes()
    stream.restarts()
    app.reconnects()
    assert app.takes() == []
    assert app.client.known_upto == 2
    stream.tentative(1, 3, 1, 2, 3)  # the next instance starts its tentative line again
    assert app.takes() == ["TENTATIVE 3"]
    stream.stable(3, 1, 3)
    assert app.takes() == ["STABLE 1!", "EMPTY 2!", "STABLE 3!", "REC_DONE 3"]


def test_property_2_2_stable_buckets_of_another_replica_replace_tentative_buckets(
    stream: Stream, app: Application
) -> None:
    """The current replica may never have sent a tentative bucket."""
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    app.takes()
    stream.stable(1, 1)
    app.reconnects()
    assert app.takes() == ["STABLE 1!"]


def test_property_2_3_a_new_connection_delivers_only_newer_tentative_buckets(
    stream: Stream, app: Application
) -> None:
    stream.tentative(0, 1, 0, 1)
    app.takes()
    stream.tentative(2, 2, 2)
    app.reconnects()
    assert app.takes() == ["TENTATIVE 2"]


def test_a_tentative_bucket_whose_function_raised_is_delivered_again(
    stream: Stream, app: Application
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 3, 1, 2, 3)
    given = app.gets()
    assert [spelled(*next(given)) for _ in range(3)] == ["STABLE 0", "TENTATIVE 1", "TENTATIVE 2"]
    given.close()  # the function raised on bucket 2
    app.reconnects()
    assert app.takes() == ["TENTATIVE 2", "TENTATIVE 3"]
    assert app.client.tentative_rows == 3
    stream.stable(3, 1, 2, 3)
    assert app.takes() == ["STABLE 1!", "STABLE 2!", "STABLE 3!", "REC_DONE 3"]


def test_3_1_a_client_that_tolerates_no_inconsistency_receives_no_tentative_bucket(
    stream: Stream,
) -> None:
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


# -- a client that restarts -----------------------------------------------------------------------


def test_a_client_restarted_during_a_failure_delivers_valid_tentative_buckets_again(
    stream: Stream, restarting: Restarting
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 3, 1, 2, 3)
    assert restarting.takes() == ["STABLE 0", "TENTATIVE 1", "TENTATIVE 2", "TENTATIVE 3"]
    stream.stable(1, 1)
    restarting.restarts()
    assert restarting.client.known_upto == 3, "the application has these buckets"
    assert restarting.takes() == ["STABLE 1!", "TENTATIVE 2!", "TENTATIVE 3!"]
    stream.stable(3, 3)
    assert restarting.takes() == ["EMPTY 2!", "STABLE 3!", "REC_DONE 3"]


def test_a_client_restarted_twice_delivers_tentative_buckets_again_each_time(
    stream: Stream, restarting: Restarting
) -> None:
    stream.tentative(0, 1, 0, 1)
    restarting.takes()
    for _ in range(2):
        restarting.restarts()
        assert restarting.takes() == ["TENTATIVE 0!", "TENTATIVE 1!"]
    stream.tentative(2, 2, 2)
    assert restarting.takes() == ["TENTATIVE 2"], "bucket 2 is new"


def test_a_client_restarted_after_the_correction_replaces_all_tentative_buckets(
    stream: Stream, restarting: Restarting
) -> None:
    """Otherwise a tentative bucket whose stable version is empty would never be replaced."""
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    restarting.takes()
    stream.stable(3, 2)
    restarting.restarts()
    assert restarting.takes() == ["EMPTY 1!", "STABLE 2!", "REC_DONE 3"]
    restarting.restarts()
    stream.stable(4, 4)
    assert restarting.takes() == ["STABLE 4"], "no uncorrected tentative bucket was left"


def test_a_restarted_client_continues_after_the_tentative_buckets(
    stream: Stream, restarting: Restarting
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 2, 1, 2)
    restarting.takes()
    restarting.restarts()
    stream.stable(1, 1)
    stream.stable(4, 3)
    assert restarting.takes() == ["STABLE 1!", "EMPTY 2!", "STABLE 3", "REC_DONE 4"]


def test_a_client_restarted_without_uncorrected_buckets_replaces_nothing(
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


def test_a_client_killed_during_a_tentative_delivery_replaces_its_buckets(
    stream: Stream, restarting: Restarting
) -> None:
    stream.tentative(0, 2, 0, 1, 2)
    next(restarting.app.gets())  # the process crashes after the delivery of bucket 0
    restarting.restarts()
    assert restarting.takes() == ["TENTATIVE 0!", "TENTATIVE 1!", "TENTATIVE 2!"]


def test_tentative_buckets_are_neither_durable_nor_acknowledged(
    stream: Stream, tmp_path: Path
) -> None:
    """A restarted application has lost them and receives them again."""
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


def test_the_counters_of_tentative_rows_and_replacements_survive_a_restart(
    stream: Stream, restarting: Restarting
) -> None:
    stream.tentative(0, 1, 0, 1)
    restarting.takes()
    stream.stable(1, 1)
    restarting.takes()
    restarting.restarts()
    client = restarting.client
    assert (client.tentative_rows, client.replacements) == (2, 2)


def test_iteration_yields_the_same_as_taking_deliveries(stream: Stream) -> None:
    """The loop over connections adds nothing, and ends with the output."""
    client = Client("s", {"node": lambda: InProcess(stream.service)}, WIDTH, tentative=True)
    stream.stable(0, 0)
    stream.tentative(1, 2, 1)
    buckets = []
    for table, info in client:
        buckets.append(spelled(table, info))
        if buckets[-1] == "TENTATIVE 1":
            stream.stable(2, 1, then=(Ended("s"),))
    assert buckets == ["STABLE 0", "TENTATIVE 1", "STABLE 1!", "REC_DONE 2"]
    assert client.ended
