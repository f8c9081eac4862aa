"""Faulty links between a client and an echo server. No test sleeps for a fixed time: every wait
ends with an event, or proves within a limit that no event occurs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from holdfast.verify.chaos.proxy import Link, Proxies

LIMIT_S = 10.0
#: A connection counts as quiet if no byte arrives for this long.
QUIET_S = 0.15


class Echo:
    """Server that sends back the bytes it receives, after an optional `greeting`."""

    def __init__(self, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        host, port = self._listening.getsockname()
        self.address = f"{host}:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.open.append(connection)
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            connection.sendall(self.greeting)
            while data := connection.recv(65_536):
                connection.sendall(data)
        except OSError:
            pass
        connection.close()

    def close(self) -> None:
        for connection in (self._listening, *self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def link(echo: Echo) -> Iterator[Link]:
    proxies = Proxies()
    yield proxies.link("server", "client", echo.address)
    proxies.close()


@pytest.fixture
def client(link: Link) -> Iterator[socket.socket]:
    host, _, port = link.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as client:
        yield client


def hear(client: socket.socket, size: int) -> bytes:
    client.settimeout(LIMIT_S)
    received = b""
    while len(received) < size and (data := client.recv(65_536)):
        received += data
    return received


def quiet(client: socket.socket) -> bool:
    client.settimeout(QUIET_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    return False


def wait_for(test: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not test():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_bytes_pass_in_both_directions_in_order(client: socket.socket) -> None:
    sent = bytes(range(256)) * 4_000
    threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
    assert hear(client, len(sent)) == sent


def test_bytes_sent_during_a_cut_arrive_after_healing(link: Link, client: socket.socket) -> None:
    client.sendall(b"before")
    assert hear(client, 6) == b"before"
    link.cut()
    client.sendall(b"during")
    assert quiet(client)
    link.heal()
    assert hear(client, 6) == b"during"


def test_a_single_direction_can_be_cut(link: Link, echo: Echo, client: socket.socket) -> None:
    client.sendall(b"a")
    assert hear(client, 1) == b"a"
    link.cut("server")
    client.sendall(b"question")
    assert quiet(client)
    link.heal("server")
    assert hear(client, 8) == b"question"  # the request had arrived, only the answer was blocked
    link.cut("client")
    echo.open[0].sendall(b"news")
    assert hear(client, 4) == b"news"
    client.sendall(b"x")
    assert quiet(client)


def test_the_end_of_a_connection_does_not_pass_a_cut(
    link: Link, echo: Echo, client: socket.socket
) -> None:
    client.sendall(b"a")
    assert hear(client, 1) == b"a"
    link.cut()
    echo.close()
    assert quiet(client)
    link.heal()
    client.settimeout(LIMIT_S)
    assert client.recv(1) == b""


def test_a_connection_opened_during_a_cut_carries_no_bytes(link: Link, echo: Echo) -> None:
    link.cut()
    host, _, port = link.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as client:
        client.sendall(b"hello")
        assert quiet(client)
        assert echo.open == []
        link.heal()
        assert hear(client, 5) == b"hello"


def test_a_reset_breaks_connections_and_allows_new_ones(link: Link, client: socket.socket) -> None:
    client.sendall(b"a")
    assert hear(client, 1) == b"a"
    link.reset()
    client.settimeout(LIMIT_S)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    host, _, port = link.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as again:
        again.sendall(b"b")
        assert hear(again, 1) == b"b"


def test_a_delay_applies_to_every_byte_and_keeps_their_order(
    link: Link, client: socket.socket
) -> None:
    link.delay(200, "server")
    began = time.monotonic()
    for part in (b"1", b"2", b"3"):
        client.sendall(part)
    assert hear(client, 3) == b"123"
    took = time.monotonic() - began
    assert 0.2 <= took < LIMIT_S / 2
    link.delay(0)
    client.sendall(b"4")
    assert hear(client, 1) == b"4"


def test_throttled_bytes_arrive_at_the_configured_rate(link: Link, client: socket.socket) -> None:
    link.throttle(100, "server")
    began = time.monotonic()
    client.sendall(b"x" * 50_000)
    assert len(hear(client, 50_000)) == 50_000
    assert time.monotonic() - began >= 0.45


def test_new_connections_go_to_the_new_target(link: Link, client: socket.socket) -> None:
    other = Echo(greeting=b"other")
    client.sendall(b"b")
    assert hear(client, 1) == b"b"  # connected to the first server
    link.lead_to(other.address)
    client.sendall(b"a")
    assert hear(client, 1) == b"a"  # open connections keep their target
    host, _, port = link.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as again:
        assert hear(again, 5) == b"other"
    other.close()


def test_a_missing_server_ends_the_connection(echo: Echo) -> None:
    proxies = Proxies()
    try:
        link = proxies.link("server", "client", echo.address)
        echo.close()
        host, _, port = link.address.partition(":")
        client = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        with client, suppress(ConnectionResetError):
            assert client.recv(1) == b""
        wait_for(lambda: link.connections == 0)
    finally:
        proxies.close()


def test_close_ends_the_thread_and_all_connections(echo: Echo) -> None:
    proxies = Proxies()
    links = [proxies.link(f"s{n}", "client", echo.address) for n in range(3)]
    clients = []
    for link in links:
        host, _, port = link.address.partition(":")
        clients.append(socket.create_connection((host, int(port)), timeout=LIMIT_S))
        clients[-1].sendall(b"a")
        assert hear(clients[-1], 1) == b"a"
        link.cut()
    proxies.close()
    for client in clients:
        with client, pytest.raises(ConnectionResetError):
            client.recv(1)
    assert "proxies" not in [thread.name for thread in threading.enumerate()]


def test_a_link_cut_by_two_faults_opens_when_both_are_repaired(
    link: Link, client: socket.socket
) -> None:
    client.sendall(b"hello")
    assert hear(client, 5) == b"hello"
    link.cut("client")
    link.cut("client")
    link.mend("client")
    client.sendall(b"again")
    assert quiet(client)
    link.mend("client")
    assert hear(client, 5) == b"again"
