"""Drives a host (`core.hosts`) with threads: one thread sends heartbeats and never waits for a
disk, others stop nodes. This module decides nothing and does not need Spark."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from holdfast.clock import monotonic_us
from holdfast.core.hosts import (
    HEARTBEAT_US,
    Action,
    Answered,
    End,
    Event,
    Host,
    NodeFailed,
    NodeProgressed,
    NodeStopped,
    Report,
    StartNode,
    StopNode,
)
from holdfast.core.membership import InstanceStatus
from holdfast.core.quarantine import kind_of, reason_of
from holdfast.errors import HoldfastError
from holdfast.storage.segment import REMEDY
from holdfast.streams.calls import Instance, Register, Registration
from holdfast.streams.heartbeats import heartbeat_event

_log = logging.getLogger("holdfast.host")


class Running(Protocol):
    """A started node, which runs in its own threads."""

    @property
    def name(self) -> str: ...
    @property
    def position(self) -> int | None: ...
    @property
    def error(self) -> BaseException | None: ...
    def instance(self) -> Instance | None: ...
    def heard(self, consumers: Any, statuses: Mapping[str, InstanceStatus]) -> None: ...
    def stop(self) -> None: ...


class HostLoop:
    """Sends heartbeats and carries out the actions of `core.hosts`. Setting `wake` sends the next
    heartbeat at once."""

    def __init__(
        self,
        name: str,
        epoch: int,
        core: Host,
        chief: Callable[[Register], Registration],
        start: Callable[[StartNode], Running],
        wake: threading.Event,
        *,
        clock: Callable[[], int] = monotonic_us,
    ) -> None:
        self.name, self._epoch, self._core = name, epoch, core
        self._chief, self._start, self._wake, self._clock = chief, start, wake, clock
        self.nodes: dict[str, Running] = {}
        #: Names of nodes that have stopped completely.
        self._stopped: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: Why the process must end; None while the process continues.
        self.end: End | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set() and self.end is None:
                self._wake.clear()
                self.heartbeat()
                self.look()
                self._wake.wait(HEARTBEAT_US / 1e6)
        finally:
            for node in self.nodes.values():
                node.stop()

    def heartbeat(self) -> None:
        instances = {
            name: instance for name, node in self.nodes.items() if (instance := node.instance())
        }
        at = self._clock()
        unhealthy = {
            name: condition.status(at, self.name)
            for name, condition in self._core.conditions.items()
        }
        request = Register(self.name, self._epoch, tuple(instances.values()), unhealthy)
        try:
            reply: Registration | HoldfastError = self._chief(request)
        except HoldfastError as err:
            reply = err
        event = heartbeat_event(reply, self._clock())
        self._handle(event)
        if isinstance(event, Answered) and isinstance(reply, Registration):
            for name in instances:
                if name in self.nodes:
                    self.nodes[name].heard(reply.consumers, reply.statuses)

    def look(self) -> None:
        """Pass progress, failures and stops of the nodes to the core."""
        for name, node in list(self.nodes.items()):
            if (position := node.position) is not None:
                self._handle(NodeProgressed(self._clock(), name, position))
            if (err := node.error) is not None:
                # The remedy for a damaged log is that of the condition, which knows the node.
                reason = reason_of(err).removesuffix(f"; {REMEDY}")
                self._handle(NodeFailed(self._clock(), name, kind_of(err), reason))
        with suppress(queue.Empty):
            while True:
                self._handle(NodeStopped(self._clock(), self._stopped.get_nowait()))

    def _handle(self, event: Event) -> None:
        self._perform(self._core.handle(event))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartNode():
                    self.nodes[action.node] = self._start(action)
                case StopNode():
                    stopping = threading.Thread(
                        target=self._stop, args=(self.nodes.pop(action.node),),
                        name=f"stop-{action.node}", daemon=True,
                    )  # fmt: skip
                    stopping.start()
                case Report():
                    self._report(action)
                case End():
                    self.end = self.end or action

    def _stop(self, node: Running) -> None:
        """Stop a node in a separate thread, because a running step may delay the stop."""
        try:
            node.stop()
        except Exception:
            _log.exception("node %s did not stop cleanly", node.name)
        self._stopped.put(node.name)
        self._wake.set()

    def _report(self, report: Report) -> None:
        if report.condition is None:
            _log.info("node %s is healthy again", report.node)
        else:
            status = report.condition.status(self._clock(), self.name)
            level = logging.ERROR if status.quarantined else logging.WARNING
            _log.log(level, "node %s %s", report.node, status.text)
