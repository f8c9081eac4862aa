"""Calls of hosts to the controller; requests from outside the run leave no record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.controller import Controller
from holdfast.cluster.controller_service import ControllerService
from holdfast.errors import InputError
from holdfast.storage import Log
from holdfast.streams.calls import GetAssignment, Instance, NextEpoch, Register
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess

PEERS = {"a": "a@2", "a@2": "a"}
LAYOUT = {"host-1": ("a",), "host-2": ("a@2",)}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log.open(tmp_path, "controller", fsync="never")
    yield log
    log.close()


@pytest.fixture
def chief(log: Log) -> InProcess:
    service = Service(consumers={"out": {"r", "b"}, "inner": {"a"}})
    ControllerService(Controller(log, PEERS, 0, LAYOUT), service, ["out"])
    return InProcess(service)


def test_a_host_gets_an_epoch_and_its_nodes_and_registers(chief: InProcess) -> None:
    assert chief.call(GetAssignment("host-1")).nodes == ("a",)
    epoch = chief.call(NextEpoch("process.host-1")).epoch
    node = Instance("a", "127.0.0.1:1", chief.call(NextEpoch("a", at_least=7)).epoch)
    registration = chief.call(Register("host-1", epoch, (node,)))
    assert (registration.current, registration.refused, registration.assigned) == (True, (), ("a",))
    assert registration.consumers == {"out": ("b", "r")}
    assert registration.statuses["a"].epoch == 7
    newer = chief.call(NextEpoch("process.host-1")).epoch
    assert chief.call(Register("host-1", newer, ())).current
    assert not chief.call(Register("host-1", epoch, (node,))).current


def test_predicted_recoveries_are_those_of_the_last_heartbeats(log: Log) -> None:
    """They stay when a host dies: this is when they matter."""
    service = Service(consumers={})
    controller = ControllerService(Controller(log, PEERS, 0, LAYOUT), service, ["out"])
    host = InProcess(service)
    epoch = host.call(NextEpoch("process.host-1")).epoch
    for ms in (900, 700):
        node = Instance("a", "127.0.0.1:1", 1, recovery_ms={"main": ms})
        host.call(Register("host-1", epoch, (node,)))
        assert controller.recovery_ms() == {"a": {"main": ms}}
    controller.ended("host-1")
    assert controller.recovery_ms() == {"a": {"main": 700}}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GetAssignment("nope"), r"expected a host of this run \(host-1, host-2\), found 'nope'"),
        (Register("nope", 1, ()), r"expected a host of this run \(host-1, host-2\), found 'nope'"),
        (
            Register("host-1", 1, (Instance("nope", "x", 1),)),
            r"expected a node of this run \(a, a@2\), found 'nope'",
        ),
    ],
)
def test_hosts_and_nodes_of_other_runs_are_refused(
    chief: InProcess, log: Log, request_: Register | GetAssignment, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        chief.call(request_)
    assert log.counter("registered.process.nope") == log.counter("registered.nope") == 0
    assert log.counter("registered.process.host-1") == 0
