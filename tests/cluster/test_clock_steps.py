"""Failure detection while the wall clock is stepped: only elapsed monotonic time counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import monotonic_us
from holdfast.cluster.controller import Controller
from holdfast.cluster.controller_service import ControllerService
from holdfast.storage import Log
from holdfast.streams.calls import Instance, Register
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess

S = 1_000_000
SILENCE_US = 2 * S
HOUR_US = 3_600 * S
EVERY_S = 0.1


class Machine(threading.Event):
    """Both clocks of a machine; they move while the controller's loop waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now_us, self.wall_us = 50 * S, 1_700_000_000 * S
        self.each: Callable[[], None] = lambda: None
        patch.setattr(time, "time_ns", lambda: self.wall_us * 1_000)
        patch.setattr(time, "monotonic_ns", lambda: self.now_us * 1_000)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now_us += int(1e6 * timeout)
        self.wall_us += int(1e6 * timeout)
        self.each()
        return self.is_set()


class Pair:
    """Two hosts with one replica of a pair each, and the controller that gets their heartbeats."""

    def __init__(self, folder: Path) -> None:
        log = Log.open(str(folder), "controller", fsync="never", archive=False)
        layout = {"a": ("a",), "b": ("b",)}
        self.controller = Controller(
            log, {"a": "b", "b": "a"}, monotonic_us(), layout, silence_us=SILENCE_US
        )
        self.service = Service()
        self.controller_service = ControllerService(self.controller, self.service, [])

    def heartbeat(self, host: str) -> None:
        node = Instance(host, "there", epoch=1)
        InProcess(self.service).call(Register(host, epoch=1, nodes=(node,)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("step_us", [-HOUR_US, HOUR_US], ids=["back", "forward"])
def test_a_host_that_hangs_during_a_clock_step_is_declared_dead_after_silence(
    tmp_path: Path, machine: Machine, step_us: int
) -> None:
    pair = Pair(tmp_path)
    began_us, hung_us = machine.now_us, machine.now_us + 5 * S
    dead_us: list[int] = []

    def each() -> None:
        if machine.now_us - hung_us in range(int(1e6 * EVERY_S)):
            machine.wall_us += step_us
        if machine.now_us < hung_us:
            pair.heartbeat("a")
        pair.heartbeat("b")
        if pair.controller.statuses()["a"].gone:
            dead_us.append(machine.now_us)
        if dead_us or machine.now_us > began_us + 60 * S:
            machine.set()

    machine.each = each
    pair.controller_service.judge(machine, EVERY_S)
    assert dead_us and dead_us[0] - hung_us <= SILENCE_US + 3 * 1e6 * EVERY_S
    assert pair.controller.statuses()["b"].lives


def test_clock_steps_never_cause_a_declaration_of_death(tmp_path: Path, machine: Machine) -> None:
    pair, rounds = Pair(tmp_path), 0

    def each() -> None:
        nonlocal rounds
        rounds += 1
        if rounds % 5 == 1:
            pair.heartbeat("a")
        if rounds % 5 == 3:
            pair.heartbeat("b")
        machine.wall_us += {0: HOUR_US, 1: -HOUR_US, 2: 900_000}.get(rounds % 7, 0)
        if rounds > 5:
            assert all(standing.lives for standing in pair.controller.statuses().values()), rounds
        if rounds > 500:
            machine.set()

    machine.each = each
    pair.controller_service.judge(machine, EVERY_S)
