"""A host: `python -m holdfast.cluster.host_main APP HOST FOLDER SUPERVISOR OPTIONS`.

One process with one SparkSession. It asks the controller again and again which nodes it is to run,
and says where they listen; one that has none stands by, warm. A node that has to begin anew does so
here, beside the others; what no new beginning mends ends the process with all of them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from holdfast.cluster.controller import process_of
from holdfast.cluster.hosted import ORPHANED_S, REGISTER_S, Hosted, Place, patiently
from holdfast.cluster.supervisor import EXPLAINED
from holdfast.config import Options
from holdfast.engine import session
from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError, InputError, StaleEpoch, TransportError
from holdfast.model.fragments import fragment_of, fragments
from holdfast.model.identity import identity_of
from holdfast.model.loading import load
from holdfast.model.partitions import one_of_each, physical
from holdfast.streams.calls import GetAssignment, Instance, NextEpoch, Register, Registration
from holdfast.transport.flight import SILENCE_S, FlightPeer


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        app, host, folder, supervisor, options = _given(argv)
        return _Host(app, host, folder, supervisor, options).run(stop)
    except TransportError as err:
        logging.getLogger("holdfast.node").warning("the supervisor is not there: %s", err)
        return 1
    except HoldfastError as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        return EXPLAINED


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
    def __init__(self, app: str, host: str, folder: str, supervisor: str, options: Options) -> None:
        self.name, self._folder = host, folder
        sessions = session.start(options, name=f"holdfast-{host}", jvm_log=f"{folder}.spark.log")
        network = physical(load(app))
        #: Taken before any function of the application is called.
        self._identity = identity_of(network)
        self._place = Place(
            network, sessions, compile_network(network, sessions.small), options,
            FlightPeer(supervisor, silence_s=max(1.0, options.silence_s / 2)),
        )  # fmt: skip
        self._nodes: dict[str, Hosted] = {}
        #: Those that are ending. It may take a step's time, and nobody waits for it.
        self._ending: dict[str, threading.Thread] = {}
        self._epoch = 0

    def run(self, stop: threading.Event) -> int:
        try:
            self._begin(stop)
            alone_s = 0.0
            while not stop.is_set():
                began = time.monotonic()
                try:
                    self._register()
                    alone_s = 0.0
                except TransportError:
                    # Time in which this process itself stood still does not count.
                    alone_s += min(time.monotonic() - began, SILENCE_S) + REGISTER_S
                    if alone_s > ORPHANED_S:
                        break
                if (failed := self._failed()) is not None:
                    if isinstance(failed, HoldfastError):
                        raise failed
                    return 1
                stop.wait(REGISTER_S)
            return 0
        finally:
            for node in self._nodes.values():
                node.stop()

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
        """Who stands by may have to run anything."""
        network = self._place.network
        parts = {part.name: part for part in fragments(network)}
        engine = Engine(
            network, self._place.sessions, f"{self._folder}.warm", compiled=self._place.compiled
        )
        for name in one_of_each(network, map(fragment_of, assigned) if assigned else parts):
            for path in parts[name].paths:
                engine.warm_up(path, rounds=2)
        os.rmdir(engine.folder)

    def _call(self, nodes: Sequence[Instance]) -> Registration:
        answer = self._place.chief.call(Register(self.name, self._epoch, tuple(nodes)))
        if not answer.current:
            raise StaleEpoch(f"host {self.name!r} of epoch {self._epoch} was replaced; it stops")
        return answer

    def _register(self) -> None:
        told = {name: said for name, node in self._nodes.items() if (said := node.told())}
        answer = self._call(list(told.values()))
        for name, node in list(self._nodes.items()):
            if name not in answer.assigned or name in answer.refused:
                # Given to another host; or declared dead, and made anew from its partner.
                if name in answer.assigned and not node.pair:
                    raise StaleEpoch(f"node {name!r} was replaced; it stops")
                self._drop(name)
            elif name in told:
                node.heard(answer.readers, answer.standings)
        self._ending = {name: end for name, end in self._ending.items() if end.is_alive()}
        for name in answer.assigned:
            if name not in self._nodes and name not in self._ending:
                own = name == self.name  # it is alone here
                folder = self._folder if own else os.path.join(self._folder, name)
                self._nodes[name] = Hosted(name, folder, self._place)

    def _failed(self) -> BaseException | None:
        """What ended a node, if a new beginning does not help; else it begins anew."""
        for name, node in list(self._nodes.items()):
            if node.error is not None and not node.again:
                return node.error
            if node.error is not None:
                self._drop(name)
        return None

    def _drop(self, name: str) -> None:
        node = self._nodes.pop(name)
        self._ending[name] = threading.Thread(target=node.stop, name=f"end-{name}", daemon=True)
        self._ending[name].start()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the JVM and gRPC threads have nothing left to say
