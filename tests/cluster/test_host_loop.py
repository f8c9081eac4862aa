"""What a host reports about its nodes. No JVM, no processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.cluster.host_loop import HostLoop
from holdfast.core.hosts import Host, StartNode
from holdfast.core.membership import InstanceStatus
from holdfast.errors import HoldfastError, InputError, LogCorrupted
from holdfast.storage.segment import REMEDY
from holdfast.streams.calls import Instance, Register, Registration


class Node:
    """A node that has failed at once."""

    position: int | None = None

    def __init__(self, name: str, error: HoldfastError) -> None:
        self.name, self.error = name, error

    def instance(self) -> Instance | None:
        return None

    def heard(self, consumers: Any, statuses: Mapping[str, InstanceStatus]) -> None:
        pass

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            InputError("another query"),
            "node a quarantined: another query. Remedy: fix the cause, then run `holdfast restart "
            "--host h1`. If the query",
        ),
        (
            LogCorrupted(f"s.parquet: the segment file is missing; {REMEDY}"),
            "node a restarting (next restart in 0 s): s.parquet: the segment file is missing. "
            "Remedy: restarts automatically and rebuilds its storage",
        ),
    ],
)
def test_a_failed_node_is_logged_and_reported_with_one_remedy(
    error: HoldfastError, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[Register] = []

    def chief(request: Register) -> Registration:
        requests.append(request)
        return Registration(current=True, assigned=("a",))

    def start(action: StartNode) -> Node:
        return Node(action.node, error)

    loop = HostLoop(
        "h1", 1, Host(0, lambda node: True), chief, start, threading.Event(), clock=lambda: 0
    )
    loop.heartbeat()
    loop.look()
    (message,) = caplog.messages
    assert message.startswith(line) and "HOST" not in message
    loop.heartbeat()
    assert message == f"node a {requests[-1].unhealthy['a'].text}"
