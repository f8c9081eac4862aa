"""A node process: `python -m holdfast.node_main APP FRAGMENT FOLDER SUPERVISOR OPTIONS`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from holdfast.app import load
from holdfast.config import Options
from holdfast.errors import (
    HoldfastError,
    InputsLost,
    SetupError,
    StaleEpoch,
    StorageFull,
    TransportError,
)
from holdfast.log import Log
from holdfast.model.fragments import (
    fragment_of,
    fragments,
    partners_of,
    producers_of,
    readers_of,
)
from holdfast.supervise import AGAIN, EXPLAINED
from holdfast.transport.flight import SILENCE_S, FlightPeer, FlightServer
from holdfast.transport.service import Peer, Service

T = TypeVar("T")
_log = logging.getLogger("holdfast.node")
#: A node whose supervisor is gone for so long ends itself.
ORPHANED_S = 10.0
REGISTER_S = 0.5


def main(argv: list[str]) -> int:
    app, name, folder, supervisor, options_json = argv
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    options = Options(**json.loads(options_json))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        return _run(app, name, folder, supervisor, options, stop)
    except HoldfastError as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        return EXPLAINED


def _run(
    app: str, name: str, folder: str, supervisor: str, options: Options, stop: threading.Event
) -> int:
    from holdfast.engine import session
    from holdfast.engine.engine import Engine
    from holdfast.node import Node

    sessions = session.start(options, name=f"holdfast-{name}", jvm_log=f"{folder}.spark.log")
    network = load(app)
    fragment = next(f for f in fragments(network) if f.name == fragment_of(name))
    log = _patiently(lambda: Log.open(folder, name, fsync=options.fsync), stop)
    chief = FlightPeer(supervisor)
    asked = {"name": name, "at_least": log.epoch}
    epoch = _patiently(lambda: chief.call("epoch", asked)["epoch"], stop)
    _patiently(lambda: log.raise_epoch(epoch), stop)
    engine = Engine(network, sessions, os.path.join(str(log.root), "state"))
    service = Service(heartbeat_s=options.heartbeat_s)
    for stream, readers in readers_of(network).items():
        if stream in fragment.outputs:
            service.readers[stream] = set(readers)

    known: dict[str, str] = {}

    def connect(maker: str) -> Peer:
        try:
            address = chief.call("locate", {"maker": maker, "reader": name})["address"]
            if address is None:
                raise TransportError(f"node {maker!r} has not reported yet")
            known[maker] = address
        except TransportError:
            if maker not in known:  # who is read does not depend on the controller
                raise
        return FlightPeer(
            known[maker], silence_s=options.silence_s, by_reference=options.by_reference
        )

    made_by = producers_of(network)
    upstream = {s: {m: partial(connect, m) for m in made_by[s]} for s in fragment.inputs}
    partners = {partner: partial(connect, partner) for partner in partners_of(network, name)}
    node = Node(name, fragment, engine, log, service, upstream, options, partners)
    service.calls["node-status"] = lambda _: node.status()
    server = FlightServer(service, options.host, 0)
    if log.epoch == 1:  # a node that comes back has buckets waiting to warm up on
        for path in fragment.paths:
            engine.warm_up(path, rounds=2)
    node.start()
    alone_s = 0.0
    while not stop.is_set() and node.failure is None:
        began = time.monotonic()
        try:
            told = {"node": name, "address": server.address, "epoch": log.epoch}
            answer = chief.call("register", told)
            if not answer["current"]:
                raise StaleEpoch(f"node {name!r} of epoch {log.epoch} was replaced; it stops")
            service.readers.update(
                {stream: set(names) for stream, names in answer["readers"].items()}
            )
            alone_s = 0.0
        except TransportError:
            # Time in which this process itself stood still does not count.
            alone_s += min(time.monotonic() - began, SILENCE_S) + REGISTER_S
            if alone_s > ORPHANED_S:
                break
        stop.wait(REGISTER_S)
    node.stop()
    server.stop()
    log.close()
    if node.failure is not None:
        if isinstance(node.failure, InputsLost):
            return AGAIN
        if isinstance(node.failure, HoldfastError):
            raise node.failure
        return 1
    return 0


def _patiently(act: Callable[[], T], stop: threading.Event) -> T:
    """A full disk, or a supervisor that does not answer at once, is no reason to give up."""
    last_heard, told = time.monotonic(), False
    while True:
        try:
            return act()
        except StorageFull as err:
            if not told:
                _log.warning("waiting for space: %s", err)
                told = True
            last_heard = time.monotonic()
        except TransportError:
            if time.monotonic() - last_heard > ORPHANED_S:
                raise
        if stop.wait(0.2):
            raise SetupError("stopped before it was up")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the JVM and gRPC threads have nothing left to say
