"""A node process: `python -m holdfast.node_main APP FRAGMENT FOLDER SUPERVISOR OPTIONS`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

import pyarrow as pa

from holdfast.app import load
from holdfast.config import Options
from holdfast.controller import Standing
from holdfast.core.catch_up import CatchUp
from holdfast.errors import (
    HoldfastError,
    InputsLost,
    LogError,
    SetupError,
    StaleEpoch,
    StorageFull,
    TransportError,
)
from holdfast.log import Log
from holdfast.log.segment import read_segment
from holdfast.model.fragments import (
    fragment_of,
    fragments,
    is_pair,
    partners_of,
    producers_of,
    readers_of,
)
from holdfast.model.partitions import physical
from holdfast.moving import DECLARED_DEAD, Moving, install, moving_of
from holdfast.source import now_us
from holdfast.supervise import AGAIN, EXPLAINED
from holdfast.transport.flight import SILENCE_S, FlightPeer, FlightServer
from holdfast.transport.service import Service
from holdfast.types import Segment

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
    network = physical(load(app))
    fragment = next(f for f in fragments(network) if f.name == fragment_of(name))
    log = _patiently(lambda: Log.open(folder, name, fsync=options.fsync), stop)
    chief = FlightPeer(supervisor)
    asked = {"name": name, "at_least": log.epoch}
    epoch = _patiently(lambda: chief.call("epoch", asked)["epoch"], stop)
    _patiently(lambda: log.raise_epoch(epoch), stop)
    service = Service(heartbeat_s=options.heartbeat_s)
    for stream, readers in readers_of(network).items():
        if stream in fragment.outputs:
            service.readers[stream] = set(readers)

    known: dict[str, str] = {}

    def connect(maker: str) -> FlightPeer:
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
    pair = is_pair(network, fragment.name)
    if pair and epoch > 1:
        paths = [path.name for path in fragment.paths]
        log = _made_anew(name, epoch, folder, log, paths, upstream, partners, options, stop)
    engine = Engine(network, sessions, os.path.join(str(log.root), "state"))
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
            if not answer["current"] and pair:
                node.stop()
                return AGAIN  # declared dead; a new one is made from the partner
            if not answer["current"]:
                raise StaleEpoch(f"node {name!r} of epoch {log.epoch} was replaced; it stops")
            service.readers.update(
                {stream: set(names) for stream, names in answer["readers"].items()}
            )
            standings = {n: Standing(*told) for n, told in answer.get("standings", {}).items()}
            node.heard(standings)
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
        if isinstance(node.failure, DECLARED_DEAD if pair else InputsLost):
            return AGAIN
        if isinstance(node.failure, HoldfastError):
            raise node.failure
        return 1
    return 0


def _made_anew(
    name: str,
    epoch: int,
    folder: str,
    log: Log,
    paths: list[str],
    upstream: Mapping[str, Mapping[str, Callable[[], FlightPeer]]],
    partners: Mapping[str, Callable[[], FlightPeer]],
    options: Options,
    stop: threading.Event,
) -> Log:
    """One of a pair comes back with what its partner knows, in a storage that begins with that. If
    nothing is to be had there, what is on its own disk has to do."""
    (partner,) = partners
    catching = CatchUp(now_us())
    while True:
        for stream, makers in upstream.items():
            for connect in makers.values():
                with suppress(HoldfastError):
                    connect().call("hold", {"stream": stream, "reader": name, "epoch": epoch})
        try:
            peer = partners[partner]()
            told = peer.call("give", {})["paths"]
            moving = [moving_of(body) for body in told]
            # From here on it begins anew, as often as it takes.
            log.close()
            shutil.rmtree(folder)
            log = _patiently(lambda: Log.open(folder, name, fsync=options.fsync), stop)
            log.raise_epoch(epoch)
            for path in moving:
                _fetch(path, peer, log)
            with suppress(HoldfastError):
                peer.call("given", {})
            _log.info("node %s has the state of %s after bucket %s", name, partner,
                      max(path.bucket for path in moving))  # fmt: skip
            return log
        except (TransportError, LogError) as err:
            own = all(log.states(path) for path in paths)
            match catching.refused(now_us(), own=own):
                case "own":
                    _log.warning("node %s comes back from its own disk: %s", name, err)
                    return log
                case "lost":
                    raise HoldfastError(
                        f"node {name!r}: both of the pair are gone and neither has what it knew on "
                        "its disk; start the network afresh, or give the fragment read='switch' to "
                        "survive the loss of both"
                    ) from None
            if catching.refusals == 1:
                _log.info("node %s waits for the state of %s: %s", name, partner, err)
        if stop.wait(REGISTER_S):
            raise SetupError("stopped before it was up")


def _fetch(path: Moving, peer: FlightPeer, log: Log) -> None:
    for file in path.files:
        into = os.path.join(str(log.root), "state", file)
        os.makedirs(os.path.dirname(into), exist_ok=True)
        peer.fetch(os.path.join("state", file), into)
    with tempfile.TemporaryDirectory(prefix="holdfast-move-") as folder:

        def rows(segment: Segment) -> pa.Table:
            file = os.path.join(folder, "segment.parquet")
            peer.fetch(segment.path, file)
            return read_segment(file, rows=segment.rows, checksum=segment.checksum)

        install(log, path, rows)


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
