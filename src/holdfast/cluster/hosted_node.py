"""A node in a host: its log, its server, and its start, stop and rebuild. The host decides how to
react to a failure of the node."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from holdfast.clock import monotonic_us, now_us
from holdfast.cluster.rebuild import Rebuild
from holdfast.config import Options
from holdfast.core.hosts import may_try_again
from holdfast.core.membership import InstanceStatus
from holdfast.core.quarantine import damaged_to_delete
from holdfast.engine.compiled import Compiled
from holdfast.engine.engine import Engine
from holdfast.engine.session import Sessions
from holdfast.engine.state import check_files
from holdfast.errors import (
    HoldfastError,
    StorageInUse,
    TransportError,
)
from holdfast.model.fragments import (
    consumers_of,
    fragment_of,
    fragments,
    is_pair,
    peers_of,
    producers_for,
)
from holdfast.model.identity import identity_of
from holdfast.model.network import Network
from holdfast.node.node import Node
from holdfast.node.state_transfer import Staging, own_paths
from holdfast.storage import Log
from holdfast.storage.files import storage
from holdfast.streams.calls import (
    GetNodeStatus,
    Instance,
    Locate,
    NextEpoch,
    NodeStatus,
)
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer

T = TypeVar("T")
#: Suffix of damaged storage that was moved aside; a number follows.
ASIDE = ".damaged-"
_log = logging.getLogger("holdfast.node")


@dataclass(frozen=True, slots=True)
class Place:
    """The resources that all nodes of a host share."""

    network: Network
    sessions: Sessions
    compiled: Compiled
    options: Options
    #: Connection to the process of the run, which contains the controller.
    chief: FlightPeer


class Hosted:
    """A node in a host, started in a thread of its own. The heartbeat thread creates it, so the
    constructor does not block. `news` is set when the node has started or failed to start. With
    `rebuild` the storage of the node is moved aside first."""

    def __init__(
        self,
        name: str,
        folder: str,
        place: Place,
        news: threading.Event,
        *,
        rebuild: bool = False,
    ) -> None:
        self.name, self._folder, self._place, self._news = name, folder, place, news
        self._rebuild = rebuild
        network = place.network
        self.fragment = next(f for f in fragments(network) if f.name == fragment_of(name))
        self.pair = is_pair(network, self.fragment.name)
        #: Error that prevented the start of the node.
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._node: Node | None = None
        self._server: FlightServer | None = None
        self._held: Log | None = None
        self._service = Service(heartbeat_s=place.options.heartbeat_s)
        self._staging = Staging(folder)
        #: Catch-up of a replica of a pair; remains set afterwards.
        self._caught_up: Rebuild | None = None
        #: Size and duration of the state transfer, if the node was rebuilt from its peer.
        self._moved: dict[str, Any] | None = None
        #: Last known address of each producer and peer.
        self._known: dict[str, str] = {}
        self._thread = threading.Thread(target=self._start, name=f"start-{name}", daemon=True)
        self._thread.start()

    # -- for the host ---------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        return self._error or (self._node.failure if self._node is not None else None)

    @property
    def position(self) -> int | None:
        """The last bucket of the slowest path; None before all paths have begun."""
        return None if self._node is None else self._node.position

    def instance(self) -> Instance | None:
        """The report of this node to the controller; None before the node listens."""
        node, server, caught_up = self._node, self._server, self._caught_up
        if node is not None and server is not None:
            positions = {n: path.position for n, path in node.performer.core.paths.items()}
            performer = node.performer
            return Instance(
                self.name, server.address, node.log.epoch, self.position, positions, True,
                tuple(performer.comparison.differences), performer.checkpoints.recovery_ms(),
            )  # fmt: skip
        if caught_up is not None:
            return Instance(self.name, caught_up.address, caught_up.epoch, up=False)
        return None

    def heard(
        self, consumers: Mapping[str, Sequence[str]], statuses: Mapping[str, InstanceStatus]
    ) -> None:
        outputs = self.fragment.outputs
        self._service.consumers.update({s: set(r) for s, r in consumers.items() if s in outputs})
        if self._node is not None:
            self._node.heard(statuses)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._node is not None:
            self._node.stop()
        if self._server is not None:
            self._server.stop()
        if self._held is not None:
            self._held.close()

    # -- start ------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._come_up()
        except BaseException as err:
            self._error = err
            if not (isinstance(err, HoldfastError) or self._stop.is_set()):
                _log.error("node %s did not start", self.name, exc_info=err)
        self._news.set()

    def _come_up(self) -> None:
        place, name, stop = self._place, self.name, self._stop
        network, options = place.network, place.options
        if self._rebuild and (aside := set_aside(self._folder)) is not None:
            _log.warning("node %s is rebuilt; its old storage was moved to %s", name, aside)
        self._held = log = patiently(self._open, stop)
        request = NextEpoch(name, at_least=log.epoch)
        epoch = patiently(lambda: place.chief.call(request).epoch, stop)
        log.raise_epoch(epoch)
        for stream, consumers in consumers_of(network).items():
            if stream in self.fragment.outputs:
                self._service.consumers[stream] = {
                    consumer
                    for consumer in consumers
                    if name in producers_for(network, stream, consumer)
                }
        upstream = {
            stream: {m: partial(self._connect, m) for m in producers_for(network, stream, name)}
            for stream in self.fragment.inputs
        }
        peers = {p: partial(self._connect, p) for p in peers_of(network, name)}
        if self.pair and epoch > 1:
            self._held = log = self._catch_up(epoch, log, upstream, tuple(peers))
        engine = Engine(
            network, place.sessions, os.path.join(str(log.root), "state"), compiled=place.compiled
        )
        node = Node(name, self.fragment, engine, log, self._service, upstream, options, peers)
        node.answer_calls()
        self._service.handle(
            GetNodeStatus, lambda _: NodeStatus(node.status() | {"moved": self._moved})
        )
        self._node = node
        node.start()
        self._server = FlightServer(self._service, options.host, 0)

    def _connect(self, producer: str, *, catching_up: bool = False) -> FlightPeer:
        options, addresses = self._place.options, self._known
        try:
            address = self._place.chief.call(Locate(producer, self.name, catching_up)).address
            if address is None:
                raise TransportError(f"node {producer!r} has not reported yet")
            addresses[producer] = address
        except TransportError:
            if producer not in addresses:  # otherwise reading continues without the controller
                raise
        return FlightPeer(
            addresses[producer], silence_s=options.silence_s, by_reference=options.by_reference
        )

    # -- catch-up ---------------------------------------------------------------------------------

    def _catch_up(
        self,
        epoch: int,
        log: Log,
        upstream: Mapping[str, Mapping[str, Callable[[], FlightPeer]]],
        peers: Sequence[str],
    ) -> Log:
        """Restart a replica of a pair from the state of its peer, or from its own disk."""
        folder = os.path.join(self._folder, "state")
        own = own_paths(log, self.fragment.paths, lambda version: check_files(version, folder))
        self._caught_up = rebuild = Rebuild(
            self.name, epoch, self.fragment.paths, log, own, upstream,
            {peer: partial(self._connect, peer, catching_up=True) for peer in peers},
            self._staging, self._open_in, listen_on=self._place.options.host, stop=self._stop,
        )  # fmt: skip
        if rebuild.run().source != "peer":
            return log
        assert rebuild.moved is not None
        self._moved = rebuild.moved | {"at_us": now_us()}
        return patiently(self._open, self._stop)

    def _open(self) -> Log:
        self._staging.settle()
        return self._open_in(self._folder)

    def _open_in(self, folder: str) -> Log:
        options, query = self._place.options, identity_of(self._place.network).digest
        return Log.open(folder, self.name, fsync=options.fsync, query=query)


def set_aside(folder: str) -> str | None:
    """Move damaged storage aside for inspection, and return its new path. The oldest storages that
    were moved earlier are deleted."""
    with storage(folder):
        if not os.path.lexists(folder):
            return None
        parent, name = os.path.split(folder)
        suffixes = [
            f.removeprefix(f"{name}{ASIDE}") for f in os.listdir(parent) if f.startswith(name)
        ]
        numbers = sorted(int(suffix) for suffix in suffixes if suffix.isdigit())
        aside = f"{folder}{ASIDE}{max([0, *numbers]) + 1}"
        os.rename(folder, aside)
        for number in damaged_to_delete(numbers):
            shutil.rmtree(f"{folder}{ASIDE}{number}", ignore_errors=True)
    return aside


def patiently(act: Callable[[], T], stop: threading.Event) -> T:
    """Retry while the controller does not answer, or while a previous process, which is about to
    end, still holds the storage."""
    began = monotonic_us()
    while True:
        try:
            return act()
        except (StorageInUse, TransportError) as err:
            waited_us = monotonic_us() - began
            if not may_try_again(waited_us, in_use=isinstance(err, StorageInUse)):
                raise
        if stop.wait(0.2):
            raise TransportError("stopped before the start was complete")
