"""A node in a host: its log, its server, and how it comes up, goes and is made anew. What follows
when it fails, the host decides."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from holdfast.clock import now_us
from holdfast.config import Options
from holdfast.core.catch_up import CatchUp
from holdfast.core.hosts import HEARTBEAT_US, ORPHANED_US
from holdfast.core.membership import Standing
from holdfast.core.quarantine import DAMAGED_KEPT
from holdfast.engine.compiled import Compiled
from holdfast.engine.engine import Engine
from holdfast.engine.session import Sessions
from holdfast.errors import (
    HoldfastError,
    LogError,
    StorageFull,
    StorageInUse,
    TransportError,
)
from holdfast.model.fragments import (
    fragment_of,
    fragments,
    is_pair,
    makers_of,
    partners_of,
    readers_of,
)
from holdfast.model.network import Network
from holdfast.node.node import Node
from holdfast.node.state_transfer import check_offer, install
from holdfast.storage import Log
from holdfast.storage.files import storage
from holdfast.storage.segment import read_segment
from holdfast.streams.calls import (
    GetNodeStatus,
    GetState,
    Hold,
    Instance,
    Locate,
    Moving,
    NextEpoch,
    NodeStatus,
    ReleaseState,
)
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.types import Segment

T = TypeVar("T")
#: What damaged storage is called from then on, with a number.
ASIDE = ".damaged-"
_log = logging.getLogger("holdfast.node")
ORPHANED_S = ORPHANED_US / 1e6
REGISTER_S = HEARTBEAT_US / 1e6


@dataclass(frozen=True, slots=True)
class Place:
    """What the nodes of a host share."""

    network: Network
    sessions: Sessions
    compiled: Compiled
    options: Options
    #: The supervisor, which is the controller.
    chief: FlightPeer


class Hosted:
    """Made by the thread that sends heartbeats, so nothing here waits; `news` is set when it has
    come up, or failed to. `rebuild`: its storage is moved aside first."""

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
        #: What ended it before it was up.
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._node: Node | None = None
        self._server: FlightServer | None = None
        self._held: Log | None = None
        self._service = Service(heartbeat_s=place.options.heartbeat_s)
        #: How it was made anew, if it was.
        self._moved: dict[str, Any] | None = None
        #: Where others were reached last.
        self._known: dict[str, str] = {}
        self._thread = threading.Thread(target=self._start, name=f"start-{name}", daemon=True)
        self._thread.start()

    # -- for the host ---------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        return self._error or (self._node.failure if self._node is not None else None)

    @property
    def position(self) -> int | None:
        """The last bucket of its slowest path; None before all have begun."""
        return None if self._node is None else self._node.position

    def told(self) -> Instance | None:
        """What the controller is told of it; None while it is not up."""
        if self._server is None or self._held is None:
            return None
        return Instance(self.name, self._server.address, self._held.epoch, self.position)

    def heard(
        self, readers: Mapping[str, Sequence[str]], standings: Mapping[str, Standing]
    ) -> None:
        assert self._node is not None
        outputs = self.fragment.outputs
        self._service.readers.update({s: set(r) for s, r in readers.items() if s in outputs})
        self._node.heard(standings)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._node is not None:
            self._node.stop()
        if self._server is not None:
            self._server.stop()
        if self._held is not None:
            self._held.close()

    # -- coming up --------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._come_up()
        except BaseException as err:
            self._error = err
            if not (isinstance(err, HoldfastError) or self._stop.is_set()):
                _log.error("node %s did not come up", self.name, exc_info=err)
        self._news.set()

    def _come_up(self) -> None:
        place, name, stop = self._place, self.name, self._stop
        network, options = place.network, place.options
        if self._rebuild and (aside := set_aside(self._folder)) is not None:
            _log.warning("node %s: its storage was moved to %s and is rebuilt", name, aside)
        self._held = log = patiently(self._open, stop)
        asked = NextEpoch(name, at_least=log.epoch)
        epoch = patiently(lambda: place.chief.call(asked).epoch, stop)
        log.raise_epoch(epoch)
        for stream, readers in readers_of(network).items():
            if stream in self.fragment.outputs:
                self._service.readers[stream] = {
                    reader for reader in readers if name in makers_of(network, stream, reader)
                }
        upstream = {
            stream: {m: partial(self._connect, m) for m in makers_of(network, stream, name)}
            for stream in self.fragment.inputs
        }
        partners = {p: partial(self._connect, p) for p in partners_of(network, name)}
        if self.pair and epoch > 1:
            self._made_anew(epoch, upstream, partners)
            log = self._held
        engine = Engine(
            network, place.sessions, os.path.join(str(log.root), "state"), compiled=place.compiled
        )
        node = Node(name, self.fragment, engine, log, self._service, upstream, options, partners)
        node.answer_calls()
        self._service.handle(
            GetNodeStatus, lambda _: NodeStatus(node.status() | {"moved": self._moved})
        )
        self._node = node
        node.start()
        self._server = FlightServer(self._service, options.host, 0)

    def _connect(self, maker: str) -> FlightPeer:
        options, known = self._place.options, self._known
        try:
            address = self._place.chief.call(Locate(maker, self.name)).address
            if address is None:
                raise TransportError(f"node {maker!r} has not reported yet")
            known[maker] = address
        except TransportError:
            if maker not in known:  # who is read does not depend on the controller
                raise
        return FlightPeer(
            known[maker], silence_s=options.silence_s, by_reference=options.by_reference
        )

    # -- being made anew --------------------------------------------------------------------------

    def _made_anew(
        self,
        epoch: int,
        upstream: Mapping[str, Mapping[str, Callable[[], FlightPeer]]],
        partners: Mapping[str, Callable[[], FlightPeer]],
    ) -> None:
        """One of a pair comes back with what its partner knows, in a storage that begins with that.
        If nothing is to be had there, what is on its own disk has to do."""
        ((partner, to_partner),) = partners.items()
        name, paths = self.name, [path.name for path in self.fragment.paths]
        catching = CatchUp(now_us())
        assert self._held is not None
        while True:
            whole = self._hold(epoch, upstream)
            try:
                peer = to_partner()
                if (moving := peer.call(GetState()).paths) is None:
                    whole = True  # it began empty itself, and nothing came yet
                    raise TransportError(f"{partner} has no state yet")
                for offered in moving:
                    check_offer(offered, self.fragment.paths)
                # From here on it begins anew, as often as it takes.
                began = time.monotonic()
                self._held.close()
                _clear(self._folder)
                self._held = log = patiently(self._open, self._stop)
                log.raise_epoch(epoch)
                moved = sum(_fetch(path, peer, log) for path in moving)
                with suppress(HoldfastError):
                    peer.call(ReleaseState())
                ms = round(1_000 * (time.monotonic() - began), 1)
                self._moved = {"bytes": moved, "ms": ms, "at_us": now_us()}
                _log.info("node %s has the state of %s after bucket %s: %s bytes in %s ms", name,
                          partner, max(path.bucket for path in moving), moved, ms)  # fmt: skip
                return
            except StorageFull as err:
                _log.warning("node %s waits for space: %s", name, err)
            except (TransportError, LogError) as err:
                own = all(self._held.states(path) for path in paths)
                match catching.refused(now_us(), own=own or whole):
                    case "own":
                        _log.warning("node %s comes back from %s: %s", name,
                                     "its own disk" if own else "the start", err)  # fmt: skip
                        return
                    case "lost":
                        raise HoldfastError(
                            f"node {name!r}: both of the pair are gone and neither has what it "
                            "knew on its disk; start the network afresh, or give the fragment "
                            "read='switch' to survive the loss of both"
                        ) from None
                if catching.refusals == 1:
                    _log.info("node %s waits for the state of %s: %s", name, partner, err)
            if self._stop.wait(REGISTER_S):
                raise TransportError("stopped before it was up")

    def _hold(
        self, epoch: int, upstream: Mapping[str, Mapping[str, Callable[[], FlightPeer]]]
    ) -> bool:
        """Ask all producers to keep what may be needed; True if every input is there since the
        start."""
        whole: set[str] = set()
        for stream, makers in upstream.items():
            asked = Hold(stream, self.name, epoch)
            for connect in makers.values():
                with suppress(HoldfastError):
                    if connect().call(asked).complete:
                        whole.add(stream)
        return whole == set(upstream)

    def _open(self) -> Log:
        return Log.open(self._folder, self.name, fsync=self._place.options.fsync)


def _fetch(path: Moving, peer: FlightPeer, log: Log) -> int:
    """Put what the partner gives into an empty log; how many bytes came."""
    moved = 0
    for file in path.files:
        into = os.path.join(str(log.root), "state", file)
        with storage(into):
            os.makedirs(os.path.dirname(into), exist_ok=True)
        moved += peer.fetch(os.path.join("state", file), into)
    with storage(log.root), tempfile.TemporaryDirectory(prefix="holdfast-move-") as folder:

        def rows(segment: Segment) -> pa.Table:
            nonlocal moved
            file = os.path.join(folder, "segment.parquet")
            moved += peer.fetch(segment.path, file)
            return read_segment(file, rows=segment.rows, checksum=segment.checksum)

        install(log, path, rows)
    return moved


def _clear(folder: str) -> None:
    """Delete a node's storage. Killed in the middle, it leaves nothing that looks like one."""
    old = f"{folder}.old"
    with storage(folder):
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(folder):
            os.rename(folder, old)
        shutil.rmtree(old, ignore_errors=True)


def set_aside(folder: str) -> str | None:
    """Move damaged storage out of the way, for people to look at; where it went. The oldest that
    were moved before are deleted."""
    with storage(folder):
        if not os.path.lexists(folder):
            return None
        parent, name = os.path.split(folder)
        ends = [f.removeprefix(f"{name}{ASIDE}") for f in os.listdir(parent) if f.startswith(name)]
        numbers = sorted(int(end) for end in ends if end.isdigit())
        aside = f"{folder}{ASIDE}{max([0, *numbers]) + 1}"
        os.rename(folder, aside)
        for number in numbers[: max(0, len(numbers) + 1 - DAMAGED_KEPT)]:
            shutil.rmtree(f"{folder}{ASIDE}{number}", ignore_errors=True)
    return aside


def patiently(act: Callable[[], T], stop: threading.Event) -> T:
    """A controller that does not answer at once, or a former process that is about to end, is no
    reason to give up."""
    began = time.monotonic()
    while True:
        try:
            return act()
        except StorageInUse:
            if time.monotonic() - began > 3 * ORPHANED_S:
                raise
        except TransportError:
            if time.monotonic() - began > ORPHANED_S:
                raise
        if stop.wait(0.2):
            raise TransportError("stopped before it was up")
