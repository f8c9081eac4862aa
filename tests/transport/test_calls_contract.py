"""Remote calls, in-process and over Flight: the same typed replies, the same refusals.

The server answers any invalid message with a Holdfast error that states what was expected. Only
requests with valid types reach a handler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from holdfast.core.divergence import Window
from holdfast.core.membership import InstanceStatus
from holdfast.core.quarantine import PartStatus
from holdfast.errors import HoldfastError, InputError, StorageFull, TransportError
from holdfast.storage import Log
from holdfast.streams import calls, codec
from holdfast.streams.calls import TABLE, Call, Hold, Instance, Moving, Request, Results
from holdfast.streams.serving import Service
from holdfast.transport import wire
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.transport.in_process import InProcess
from holdfast.types import OutputState, Segment, SegmentId, Stability, StreamInfo

SEGMENT = Segment(SegmentId("s", 0, 3), Stability.STABLE, "segments/x", 2, "0f", 7, 9, 1)
RESULTS = Results("s", "ts timestamp", "ts", 0, 2, 4, (SEGMENT,))
INFO = StreamInfo("s", "ts timestamp", "ts", 0, 4, 2, 1)

#: One of each request that has fields.
REQUESTS: list[Request[Any]] = [
    calls.Acknowledge("s", "reader", 3, -1, 1),
    calls.GetStreamStatus("s", ("reader", 3, -1, 1)),
    calls.Hold("s", "reader", 2),
    calls.GetFolderMark("s"),
    calls.Postpone("out", "main@2", 1, 5, True, False),
    calls.GetState("main@2"),
    calls.RenewState("main@2"),
    calls.ReleaseState("main@2"),
    calls.NextEpoch("main", 3),
    calls.GetAssignment("host-1"),
    calls.Register(
        "host-1",
        2,
        (Instance("main", "127.0.0.1:1", 4, 7, {"a": 3, "b": None}, recovery_ms={"a": 700}),),
        {"main@2": PartStatus("storage", "read-only", "repair it", 3, True, True, False, 9, None)},
    ),
    calls.Locate("tap", "main"),
    calls.GetProducers("out"),
    calls.Retire("tap", "sold"),
    calls.Restart("host-1"),
    calls.GetRestarted("host-1"),
]
REQUESTS += [call.request() for call in TABLE if not fields(call.request)]

#: One of each reply.
REPLIES: list[Any] = [
    calls.Done(),
    calls.StreamList((INFO, replace(INFO, tentative_upto=9, ended=True))),
    calls.StreamStatus(OutputState.UP_FAILURE, 3, None),
    calls.StreamStatus(OutputState.STABLE, 9, ended=True),
    calls.Holding(True, 0, 7),
    calls.FolderMark("/storage/sources/s/mark", "0f"),
    calls.Postponement("refused"),
    calls.OfferedState(
        "state",
        (Moving("out", 3, {"needs_from": 2}, ("out/a.1-2.parquet",), (RESULTS,)),),
        (calls.StateFile("out/a.1-2.parquet", 7, "0f"),),
    ),
    calls.Digests({"out": Window(3, 9, ((4, "0f"), (9, "1e")))}, {"out": (4, "confirmed")}),
    calls.NodeStatus({"paths": {"out": {"position": 3}}, "kind": "any", "v": None}),
    calls.Epoch(7),
    calls.Assignment(("main", "main@2")),
    calls.Registration(True, ("a",), ("b",), {"s": ("r", "r@2")}, {"a": InstanceStatus(2, 1)}),
    calls.Location(None),
    calls.Producers(()),
    calls.RunStatus({"failures": []}),
    calls.Retired(12),
    calls.Hosts(("host-1",)),
    calls.Restarted(True),
]


def name_of(request: Request[Any]) -> str:
    return calls.call_of(type(request)).name


def reply_to(request: Request[Any]) -> Any:
    return next(r for r in REPLIES if type(r) is calls.call_of(type(request)).reply)


def test_the_examples_are_complete() -> None:
    assert sorted(map(name_of, REQUESTS)) == sorted(call.name for call in TABLE)
    assert {type(reply) for reply in REPLIES} == {call.reply for call in TABLE}


# -- the server -----------------------------------------------------------------------------------


@dataclass
class Station:
    """A service that answers every call of the table, and records the requests of the handlers."""

    service: Service
    peer: InProcess | FlightPeer
    handled: list[Any]

    def ask(self, name: str, body: Any) -> Any:
        """Send any body, as a foreign process might."""
        return self.peer._action(name, body)


def plain_service(handled: list[Any]) -> Service:
    service = Service()
    for call in TABLE:

        def answer(request: Any) -> Any:
            handled.append(request)
            return reply_to(request)

        service._handlers.pop(call.request, None)  # every service has those of streams
        service.handle(call.request, answer)
    return service


@pytest.fixture(params=["in-process", "flight"])
def station(request: pytest.FixtureRequest) -> Iterator[Station]:
    handled: list[Any] = []
    service = plain_service(handled)
    if request.param == "in-process":
        yield Station(service, InProcess(service), handled)
        return
    server = FlightServer(service)
    peer = FlightPeer(server.address)
    yield Station(service, peer, handled)
    peer.close()
    server.stop()


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_a_call_delivers_its_request_and_its_reply(
    station: Station, request_: Request[Any]
) -> None:
    assert station.peer.call(request_) == reply_to(request_)
    assert station.handled == [request_]


def test_a_call_that_is_not_in_the_table_is_refused(station: Station) -> None:
    with pytest.raises(InputError, match=r"expected one of the calls ping, .*, found 'nope'"):
        station.ask("nope", {})


def test_a_call_without_a_handler_is_refused(station: Station) -> None:
    del station.service._handlers[Hold]
    with pytest.raises(InputError, match="'hold' is not served by this process"):
        station.peer.call(Hold("s", "reader", 1))


def hostile(request: Request[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies that are almost the request."""
    body = codec.encode(request)
    yield "surplus", body | {"extra": 1}
    yield "surplus \ud800", body | {"\ud800": 1}
    hints = get_type_hints(type(request), include_extras=True)
    for name, value in body.items():
        yield f"no {name}", {key: body[key] for key in body if key != name}
        yield f"renamed {name}", {key if key != name else "x": body[key] for key in body}
        wrong: list[Any] = [1.5, True, {}, {"a": []}, [], [[]], [None], float("nan")]
        if isinstance(value, str):
            wrong += [7, "\ud800"]
        if isinstance(value, bool):
            wrong.remove(True)
        if isinstance(value, int):
            wrong += ["7", "", 2**63, -(2**63) - 1, 10**400]
        if hints[name] == codec.Count:
            wrong += [-1, 2**62 + 1]
        if isinstance(value, list):
            wrong += ["text", 7, [*value, 7], {"0": 1}]
        if value is not None and "None" not in str(hints[name]):
            wrong.append(None)
        if name == "nodes":
            wrong.remove([])
        if name == "unhealthy":
            wrong.remove({})
        for other in wrong:
            yield f"{name}={codec.shown(other)}", body | {name: other}


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_an_invalid_request_is_refused_before_it_reaches_a_handler(
    station: Station, request_: Request[Any]
) -> None:
    for case, body in hostile(request_):
        with pytest.raises(InputError, match=r"expected .*found .*same version") as refused:
            station.ask(name_of(request_), body)
            pytest.fail(f"not refused: {case}")
        assert "Traceback" not in str(refused.value) and len(str(refused.value)) < 500, case
    assert station.handled == []


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_a_request_body_that_is_no_object_is_refused(request_: Request[Any]) -> None:
    """Only in-process: on the wire, the fields lie in the object of the message."""
    for body in (None, 7, "text", [], [{}], True):
        with pytest.raises(InputError, match="expected an object, found"):
            plain_service([]).answer(name_of(request_), body)


def test_a_full_disk_of_the_peer_raises_transport_error_at_the_caller(station: Station) -> None:
    def full(_: Hold) -> calls.Holding:
        raise StorageFull("no space")

    del station.service._handlers[Hold]
    station.service.handle(Hold, full)
    with pytest.raises(TransportError, match="cannot answer because of a storage error: no space"):
        station.peer.call(Hold("s", "reader", 1))


# -- registering ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Novel(Request[calls.Done]):
    pass


def test_a_call_has_exactly_one_handler_and_is_in_the_table() -> None:
    service = Service()
    with pytest.raises(AssertionError, match="Novel is not in the table"):
        service.handle(Novel, lambda _: calls.Done())
    with pytest.raises(AssertionError, match="'hold' has two handlers"):
        service.handle(Hold, lambda _: calls.Holding(True))


def test_a_handler_must_return_the_reply_type_of_its_call() -> None:
    service = Service()
    service.handle(calls.GetHosts, lambda _: calls.Done())
    with pytest.raises(AssertionError, match=r"'hosts': .*Done.* instead of .*Hosts"):
        service.answer("hosts", {})


# -- raw bytes to a server ------------------------------------------------------------------------


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Sends bytes in each of the four ways; raises the error that a peer would receive."""
    log = Log.open(tmp_path, "owner", fsync="never")
    log.open_stream("s", "ts timestamp, value bigint", "ts", 0)
    server = FlightServer(Service(logs={"s": log}))
    client = flight.FlightClient(f"grpc://{server.address}")
    limit = flight.FlightCallOptions(timeout=10)

    def send(way: str, data: bytes) -> None:
        try:
            match way:
                case "follow":
                    command = flight.FlightDescriptor.for_command(data)
                    writer, consumer = client.do_exchange(command, limit)
                    consumer.read_chunk()
                case "push":
                    command = flight.FlightDescriptor.for_command(data)
                    writer, _ = client.do_put(command, pa.schema([("a", pa.int64())]), limit)
                    writer.close()
                case "file":
                    client.do_get(flight.Ticket(data), limit).read_all()
                case _:
                    list(client.do_action(flight.Action(way, data), limit))
        except pa.ArrowException as err:
            raise wire.error_of(str(err), f"no error of ours: {err}") from None

    yield send
    client.close()
    server.stop()
    log.close()


ASKS = {
    "follow": wire.Follow("s", 0, False, None),
    "push": wire.Push("src", None, True),
    "file": wire.Fetch("state/a"),
}


@pytest.mark.parametrize("way", [*ASKS, "hold"])
@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04pickle", b"7", b"null", b"[]", b"{}", b"[" * 100_000, b'{"v":1}', b"\xff" * 9,
     b'{"v":1,"kind":"other"}', b'{"v":1,"kind":["follow"]}'],
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(
    raw: Callable[[str, bytes], None], way: str, data: bytes
) -> None:
    with pytest.raises(InputError, match=r"not JSON|expected a"):
        raw(way, data)


@pytest.mark.parametrize("way", [*ASKS, "hold"])
def test_messages_of_another_version_are_refused(
    raw: Callable[[str, bytes], None], way: str
) -> None:
    with pytest.raises(InputError, match="same version of Holdfast on both sides"):
        raw(way, json.dumps({"v": 999, "kind": way}).encode())


@pytest.mark.parametrize("way", ASKS)
def test_invalid_exchange_requests_are_refused(raw: Callable[[str, bytes], None], way: str) -> None:
    body = codec.encode(ASKS[way])
    for name in body:
        for wrong in (1.5, {}, [], ["s"], "\ud800", 10**400):
            with pytest.raises(InputError, match=r"expected .*found"):
                raw(way, wire.encode(way, body | {name: wrong}))
        with pytest.raises(InputError, match=f"no '{name}'"):
            raw(way, wire.encode(way, {key: body[key] for key in body if key != name}))
    with pytest.raises(InputError, match="found 'extra'"):
        raw(way, wire.encode(way, body | {"extra": 1}))


# -- replies --------------------------------------------------------------------------------------


class Impostor(flight.FlightServerBase):  # type: ignore[misc]
    """A foreign server, or one of another version, with arbitrary replies."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self.results: list[bytes] = []

    def do_action(self, context: Any, action: Any) -> Any:
        return iter([flight.Result(pa.py_buffer(data)) for data in self.results])

    def do_get(self, context: Any, ticket: Any) -> Any:
        batch = pa.record_batch([pa.array([b"echo pwned\n"])], names=["data"])
        return flight.RecordBatchStream(pa.Table.from_batches([batch]))


@pytest.fixture
def impostor() -> Iterator[tuple[Impostor, FlightPeer]]:
    server = Impostor()
    peer = FlightPeer(server.address)
    yield server, peer
    peer.close()
    server.shutdown()


@pytest.mark.parametrize("call", TABLE, ids=lambda call: call.name)
def test_replies_are_validated(impostor: tuple[Impostor, FlightPeer], call: Call) -> None:
    server, peer = impostor
    request = next(r for r in REQUESTS if type(r) is call.request)
    good = codec.encode(reply_to(request))
    server.results = [wire.encode("reply", good)]
    assert peer.call(request) == reply_to(request)
    bad = [good | {"extra": 1}]
    bad += [{key: good[key] for key in good if key != name} for name in good]
    bad += [good | {name: wrong} for name in good for wrong in (1.5, [1], [[]], 10**400)]
    for body in bad:
        server.results = [wire.encode("reply", body)]
        with pytest.raises(TransportError, match=f"to '{call.name}': .*same version on both sides"):
            peer.call(request)
    for data in (b"", b"7", b"{}", b"[" * 100_000, wire.encode("other", good)):
        server.results = [data]
        with pytest.raises(TransportError, match=r"not JSON|expected a 'reply'"):
            peer.call(request)
    for results in ([], [b"{}", b"{}"]):
        server.results = results
        with pytest.raises(TransportError, match="expected one reply"):
            peer.call(request)


# -- names of files -------------------------------------------------------------------------------

OUTSIDE = ["", ".", "..", "../x", "a/../../x", "a/../x", "/etc/x", "//x", "a//x", "a/", "./x",
           "a/./x", "x\0y"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_file_names_outside_the_folder_are_refused(
    impostor: tuple[Impostor, FlightPeer],
    raw: Callable[[str, bytes], None],
    name: str,
    tmp_path: Path,
) -> None:
    """A peer names the files that it offers, and the replica that is rebuilt writes them."""
    server, peer = impostor
    with pytest.raises(InputError, match="expected the name of a file inside the folder"):
        raw("file", wire.encode("file", {"name": name}))
    moving = Moving("out", 3, {}, (name,), ())
    server.results = [wire.encode("reply", codec.encode(calls.OfferedState("state", (moving,))))]
    with pytest.raises(TransportError, match="expected the name of a file inside the folder"):
        peer.call(calls.GetState("a"))
    into = tmp_path / "into"
    with pytest.raises(TransportError, match="expected a file inside its folder"):
        peer.fetch(name, str(into))
    assert not into.exists()


@pytest.mark.parametrize("name", ["x", "a/b", "..x", "a/..b", "...", "out/win.1--2.0f.parquet"])
def test_file_names_inside_the_folder_are_accepted(name: str) -> None:
    assert codec.is_inside(name)


def test_an_internal_error_of_the_server_is_reported_without_details(
    caplog: pytest.LogCaptureFixture, station: Station
) -> None:
    def faulty(_: Hold) -> calls.Holding:
        raise KeyError("of our own")

    del station.service._handlers[Hold]
    station.service.handle(Hold, faulty)
    if isinstance(station.peer, InProcess):
        with pytest.raises(KeyError):  # the handler runs in the caller's own process
            station.peer.call(Hold("s", "reader", 1))
        return
    with pytest.raises(TransportError, match=r"the server failed \(KeyError\); see its log"):
        station.peer.call(Hold("s", "reader", 1))
    assert "of our own" in caplog.text


def test_holdfast_errors_keep_their_class(station: Station) -> None:
    def refuse(_: Hold) -> calls.Holding:
        raise HoldfastError("no: because")

    del station.service._handlers[Hold]
    station.service.handle(Hold, refuse)
    with pytest.raises(HoldfastError, match="no: because"):
        station.peer.call(Hold("s", "reader", 1))
