"""A host: `python -m holdfast.cluster.host_main APP HOST FOLDER SUPERVISOR OPTIONS`.

One process with one SparkSession. Its heartbeats ask the controller which nodes it is to run, and
say where they listen; a host without nodes is a standby, and warm. What to start, stop and try
again, and when to end, `core.hosts` decides; here are the thread that sends heartbeats, which waits
for no disk, and those that start and stop nodes.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from holdfast.clock import monotonic_us
from holdfast.cluster.hosted import Hosted, Place, patiently
from holdfast.config import Options
from holdfast.core.hosts import (
    HEARTBEAT_US,
    Action,
    Answered,
    End,
    Host,
    NodeFailed,
    NodeProgressed,
    NodeStopped,
    Report,
    StartNode,
    StopNode,
)
from holdfast.core.membership import process_of
from holdfast.core.quarantine import EXIT_CODES, kind_of, reason_of
from holdfast.engine import session
from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError, InputError
from holdfast.model.fragments import fragment_of, fragments, is_pair
from holdfast.model.identity import identity_of
from holdfast.model.loading import load
from holdfast.model.partitions import one_of_each, physical
from holdfast.streams.calls import GetAssignment, NextEpoch, Register, Registration
from holdfast.streams.heartbeats import heartbeat_event
from holdfast.transport.flight import FlightPeer

_log = logging.getLogger("holdfast.host")


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop, wake = threading.Event(), threading.Event()

    def end() -> None:
        stop.set()
        wake.set()

    # A handler interrupts whoever may hold the lock of an event, so it takes none itself.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end).start())
    try:
        app, host, folder, supervisor, options = _given(argv)
        return _Host(app, host, folder, supervisor, options, wake).run(stop)
    except (HoldfastError, OSError) as err:
        if stop.is_set():
            return 0
        print(f"error: {err}", file=sys.stderr, flush=True)
        return EXIT_CODES.get(kind_of(err), EXIT_CODES["crash"])


def _given(argv: list[str]) -> tuple[str, str, str, str, Options]:
    """What the supervisor gave. It may be of another version than this code, which is on the disk:
    starting again would not help then."""
    try:
        app, host, folder, supervisor, options_json = argv
        return app, host, folder, supervisor, Options.of(json.loads(options_json))
    except ValueError:
        raise InputError(
            f"expected APP HOST FOLDER SUPERVISOR OPTIONS, found {len(argv)} arguments of another "
            "version of Holdfast; stop the run and start it again"
        ) from None


class _Host:
    """`wake` is set when there is something to tell before the next heartbeat is due."""

    def __init__(
        self,
        app: str,
        host: str,
        folder: str,
        supervisor: str,
        options: Options,
        wake: threading.Event,
    ) -> None:
        self.name, self._folder, self._wake = host, folder, wake
        sessions = session.start(options, name=f"holdfast-{host}", jvm_log=f"{folder}.spark.log")
        network = physical(load(app))
        #: Taken before any function of the application is called.
        self._identity = identity_of(network)
        self._place = Place(
            network, sessions, compile_network(network, sessions.small), options,
            FlightPeer(supervisor, silence_s=max(1.0, options.silence_s / 2)),
        )  # fmt: skip
        self._core = Host(monotonic_us(), self._rebuildable)
        self._nodes: dict[str, Hosted] = {}
        #: Names of nodes of which nothing runs any more.
        self._stopped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._epoch = 0
        self._end: End | None = None

    def run(self, stop: threading.Event) -> int:
        try:
            self._begin(stop)
            while not stop.is_set() and self._end is None:
                self._wake.clear()
                self._heartbeat()
                self._look()
                self._wake.wait(HEARTBEAT_US / 1e6)
        finally:
            for node in self._nodes.values():
                node.stop()
        if self._end is None:
            return 0
        print(f"error: {self._end.why}", file=sys.stderr, flush=True)
        return self._end.code

    def _begin(self, stop: threading.Event) -> None:
        """An epoch for the process; and, on its first day, warm before anything counts. Who comes
        back has buckets waiting to warm up on."""
        chief = self._place.chief
        ask = NextEpoch(process_of(self.name), identity=self._identity)
        self._epoch = patiently(lambda: chief.call(ask).epoch, stop)
        assigned = patiently(lambda: chief.call(GetAssignment(self.name)).nodes, stop)
        if self._epoch == 1 or not assigned:
            self._warm_up(assigned)

    def _warm_up(self, assigned: Sequence[str]) -> None:
        """A standby may have to run anything."""
        network = self._place.network
        parts = {part.name: part for part in fragments(network)}
        engine = Engine(
            network, self._place.sessions, f"{self._folder}.warm", compiled=self._place.compiled
        )
        for name in one_of_each(network, map(fragment_of, assigned) if assigned else parts):
            for path in parts[name].paths:
                engine.warm_up(path, rounds=2)
        os.rmdir(engine.folder)

    def _rebuildable(self, node: str) -> bool:
        """Upstream keeps what an empty node needs, or the other of the pair has its state."""
        pair = is_pair(self._place.network, fragment_of(node))
        return pair or self._place.options.recovery == "replay"

    def _heartbeat(self) -> None:
        up = {name: said for name, node in self._nodes.items() if (said := node.told())}
        at = monotonic_us()
        unhealthy = {name: met.status(at) for name, met in self._core.conditions.items()}
        asked = Register(self.name, self._epoch, tuple(up.values()), unhealthy)
        try:
            reply: Registration | HoldfastError = self._place.chief.call(asked)
        except HoldfastError as err:
            reply = err
        event = heartbeat_event(reply, monotonic_us())
        self._perform(self._core.handle(event))
        if isinstance(event, Answered) and isinstance(reply, Registration):
            for name in up:
                if name in self._nodes:
                    self._nodes[name].heard(reply.readers, reply.standings)

    def _look(self) -> None:
        """What became of the nodes since."""
        for name, node in list(self._nodes.items()):
            if (position := node.position) is not None:
                progressed = NodeProgressed(monotonic_us(), name, position)
                self._perform(self._core.handle(progressed))
            if (err := node.error) is not None:
                failed = NodeFailed(monotonic_us(), name, kind_of(err), reason_of(err))
                self._perform(self._core.handle(failed))
        with suppress(queue.Empty):
            while True:
                stopped = NodeStopped(monotonic_us(), self._stopped.get_nowait())
                self._perform(self._core.handle(stopped))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartNode():
                    own = action.node == self.name  # it has the host for itself
                    folder = self._folder if own else os.path.join(self._folder, action.node)
                    self._nodes[action.node] = Hosted(
                        action.node, folder, self._place, self._wake, rebuild=action.rebuild
                    )
                case StopNode():
                    stopping = threading.Thread(
                        target=self._stop, args=(self._nodes.pop(action.node),),
                        name=f"stop-{action.node}", daemon=True,
                    )  # fmt: skip
                    stopping.start()
                case Report():
                    self._report(action)
                case End():
                    self._end = self._end or action

    def _stop(self, node: Hosted) -> None:
        """It may take a step's time, and nobody waits for it."""
        try:
            node.stop()
        except Exception:
            _log.exception("node %s did not stop in good order", node.name)
        self._stopped.put(node.name)
        self._wake.set()

    def _report(self, report: Report) -> None:
        if report.condition is None:
            _log.info("node %s works again", report.node)
        else:
            told = report.condition.status(monotonic_us())
            level = logging.ERROR if told.quarantined else logging.WARNING
            _log.log(level, "node %s %s", report.node, told.text)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the JVM and gRPC threads have nothing left to say
