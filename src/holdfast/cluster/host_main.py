"""A host: `python -m holdfast.cluster.host_main APP HOST FOLDER SUPERVISOR OPTIONS`.

A host is one process with one SparkSession. The replies to its heartbeats name the nodes that the
host must run, and the heartbeats report the addresses of these nodes. A host without nodes is a
standby with warm code. `core.hosts` decides which nodes to start, stop and retry, and when the
process ends; `host_loop` drives it. This module provides the environment of the nodes: Spark, the
application and its storage.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from holdfast.clock import monotonic_us
from holdfast.cluster.host_loop import HostLoop
from holdfast.cluster.hosted_node import Hosted, Place, patiently
from holdfast.config import Options
from holdfast.core.hosts import Host, StartNode
from holdfast.core.membership import process_of
from holdfast.core.quarantine import EXIT_CODES, kind_of, reason_of
from holdfast.engine import session
from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError, InputError
from holdfast.model.fragments import fragment_of, fragments, is_pair, recovery_of
from holdfast.model.identity import identity_of
from holdfast.model.loading import load
from holdfast.model.partitions import one_of_each, physical
from holdfast.streams.calls import GetAssignment, NextEpoch
from holdfast.transport.flight import FlightPeer

_log = logging.getLogger("holdfast.host")


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop, wake = threading.Event(), threading.Event()

    def end() -> None:
        stop.set()
        wake.set()

    # The interrupted code may hold the lock of an event, so the handler itself takes no lock.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end).start())
    try:
        app, host, folder, supervisor, options = _given(argv)
        return _Host(app, host, folder, supervisor, options, wake).run(stop)
    except (HoldfastError, OSError) as err:
        if stop.is_set():
            return 0
        print(f"error: {reason_of(err)}", file=sys.stderr, flush=True)
        return EXIT_CODES.get(kind_of(err), EXIT_CODES["crash"])


def _given(argv: list[str]) -> tuple[str, str, str, str, Options]:
    """Parse the arguments from the supervisor. The supervisor may run another version than the code
    on disk; a restart of the host would not help then, so the error is an `InputError`."""
    try:
        app, host, folder, supervisor, options_json = argv
        return app, host, folder, supervisor, Options.of(json.loads(options_json))
    except ValueError:
        raise InputError(
            f"expected APP HOST FOLDER SUPERVISOR OPTIONS, found {len(argv)} arguments of another "
            "version of Holdfast; stop the run and start it again"
        ) from None


class _Host:
    """A host process. Setting `wake` sends the next heartbeat at once."""

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
        #: Computed before any function of the application is called.
        self._identity = identity_of(network)
        self._place = Place(
            network, sessions, compile_network(network, sessions.small), options,
            FlightPeer(supervisor, silence_s=max(1.0, options.silence_s / 2)),
        )  # fmt: skip
        self._core = Host(monotonic_us(), self._rebuildable)

    def run(self, stop: threading.Event) -> int:
        epoch = self._begin(stop)
        chief = self._place.chief
        loop = HostLoop(self.name, epoch, self._core, chief.call, self._start, self._wake)
        loop.run(stop)
        if loop.end is None:
            return 0
        print(f"error: {loop.end.why}", file=sys.stderr, flush=True)
        return loop.end.code

    def _begin(self, stop: threading.Event) -> int:
        """Get an epoch for the process, and warm up if that is worthwhile."""
        chief = self._place.chief
        request = NextEpoch(process_of(self.name), identity=self._identity)
        epoch = patiently(lambda: chief.call(request).epoch, stop)
        assigned = patiently(lambda: chief.call(GetAssignment(self.name)).nodes, stop)
        network = self._place.network
        stated = [network.protection(fragment_of(node)).recovery_time for node in assigned]
        if self._core.warms_up(epoch, has_nodes=bool(assigned), states_recovery_time=any(stated)):
            self._warm_up(assigned)
        return epoch

    def _start(self, action: StartNode) -> Hosted:
        own = action.node == self.name  # the host runs only this node
        folder = self._folder if own else os.path.join(self._folder, action.node)
        return Hosted(action.node, folder, self._place, self._wake, rebuild=action.rebuild)

    def _warm_up(self, assigned: Sequence[str]) -> None:
        """Run the paths of the assigned nodes on generated rows; a standby warms up all fragments,
        because it may have to run any of them."""
        network = self._place.network
        by_name = {fragment.name: fragment for fragment in fragments(network)}
        engine = Engine(
            network, self._place.sessions, f"{self._folder}.warm", compiled=self._place.compiled
        )
        for name in one_of_each(network, map(fragment_of, assigned) if assigned else by_name):
            for path in by_name[name].paths:
                engine.warm_up(path, rounds=2)
        os.rmdir(engine.folder)

    def _rebuildable(self, node: str) -> bool:
        """Whether an empty node can rebuild its state: from its peer, or from upstream logs."""
        network, fragment = self._place.network, fragment_of(node)
        return (
            is_pair(network, fragment)
            or recovery_of(network, fragment, self._place.options) == "replay"
        )


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # skips waiting for the JVM and the gRPC threads
