"""Drives the catch-up of a copy (`core.catch_up`) with threads: whatever takes time runs in one of
its own and comes back as an event. Nothing is decided here."""

from __future__ import annotations

import heapq
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from holdfast.clock import monotonic_us
from holdfast.core import transfer as core
from holdfast.core.catch_up import CatchUp
from holdfast.errors import (
    HoldfastError,
    LogError,
    StaleEpoch,
    StateLost,
    TransportError,
)
from holdfast.model.fragments import Path
from holdfast.node.state_transfer import Staging, failure_of, not_held, peer_answer
from holdfast.storage import Log
from holdfast.streams.calls import GetState, Hold, OfferedState, ReleaseState, RenewState
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer

_log = logging.getLogger("holdfast.node")
Connect = Callable[[], FlightPeer]
#: So often the loop looks whether it is to stop.
LOOK_S = 0.2


class Rebuild:
    """Of the copy whose storage is `own`, which is open. After `run` it is that; or else, where
    another one replaced it, closed."""

    def __init__(
        self,
        name: str,
        epoch: int,
        paths: Sequence[Path],
        own: Log,
        own_paths: Mapping[str, core.OwnPath],
        producers: Mapping[str, Mapping[str, Connect]],
        peers: Mapping[str, Connect],
        staging: Staging,
        open_log: Callable[[str], Log],
        *,
        listen_on: str,
        stop: threading.Event,
    ) -> None:
        self.name, self.epoch, self._paths = name, epoch, paths
        self._own, self._open_log, self._staging = own, open_log, staging
        self._producers, self._peers, self._stop = producers, peers, stop
        makers = {stream: tuple(found) for stream, found in producers.items()}
        self._core = CatchUp(name, tuple(peers), makers, own_paths)
        self._events: queue.Queue[core.Event] = queue.Queue()
        self._wakes: list[int] = []
        self._connections: dict[str, FlightPeer] = {}
        self._workers = ThreadPoolExecutor(8, f"rebuild-{name}")
        # Whoever is caught up itself may ask what this one has.
        service = Service()
        service.handle(GetState, lambda _: OfferedState("waits", own=self._core.as_peer().own))
        self._server = FlightServer(service, listen_on, 0)
        self._began = 0
        #: The storage is closed and could not be replaced.
        self._stuck: LogError | None = None
        #: What was moved, where the copy was rebuilt from another one.
        self.moved: dict[str, float] | None = None

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def trouble(self) -> str | None:
        return self._core.trouble

    def run(self) -> core.ComeUp:
        """Until the copy can come up; raises why it cannot."""
        said: str | None = None
        event: core.Event = core.Begin(monotonic_us())
        try:
            while True:
                for action in self._core.handle(event):
                    if isinstance(action, core.ComeUp):
                        _log.info("node %s comes up from %s: %s",
                                  self.name, action.source, action.why)  # fmt: skip
                        return action
                    self._perform(action)
                if self._core.trouble not in (None, said):
                    said = self._core.trouble
                    _log.info("node %s waits to be caught up: %s", self.name, said)
                event = self._next()
                if self._stuck is not None:
                    raise TransportError(f"node {self.name!r} begins again: {self._stuck}")
        finally:
            for peer in self._connections.values():
                peer.close()
            self._workers.shutdown(wait=True)
            self._server.stop()

    def _next(self) -> core.Event:
        while not self._stop.is_set():
            now = monotonic_us()
            if self._wakes and self._wakes[0] <= now:
                heapq.heappop(self._wakes)
                return core.Tick(now)
            due_s = (self._wakes[0] - now) / 1e6 if self._wakes else LOOK_S
            with suppress(queue.Empty):
                return self._events.get(timeout=min(due_s, LOOK_S))
        raise TransportError("stopped before it was up")

    def _perform(self, action: core.Action) -> None:
        match action:
            case core.Wake():
                heapq.heappush(self._wakes, action.at)
            case core.Discard():
                with suppress(LogError):
                    self._staging.discard()
            case core.GiveUp():
                raise (StaleEpoch if action.replaced else StateLost)(action.why)
            case _:
                self._workers.submit(self._carry_out, action)

    # -- in threads of their own ------------------------------------------------------------------

    def _carry_out(self, action: core.Action) -> None:
        match action:
            case core.Hold():
                answer = self._hold(action)
                self._events.put(
                    core.HoldAnswered(
                        monotonic_us(), action.round, action.stream, action.producer, answer
                    )
                )
            case core.AskState():
                state = self._ask_state(action)
                self._events.put(core.PeerAnswered(monotonic_us(), action.round, state))
            case core.Fetch():
                self._events.put(self._fetch(action))
            case core.Install():
                self._events.put(self._install(action))
            case core.Renew():
                with suppress(HoldfastError):
                    self._peer(action.peer).call(RenewState(self.name))
            case core.Release():
                with suppress(HoldfastError):
                    self._peer(action.peer).call(ReleaseState(self.name))

    def _hold(self, action: core.Hold) -> core.HoldAnswer:
        try:
            peer = self._producers[action.stream][action.producer]()
            try:
                held = peer.call(Hold(action.stream, self.name, self.epoch))
            finally:
                peer.close()
        except HoldfastError as err:
            return not_held(err)
        return core.Held(held.starts_at, held.trimmed_upto) if held.open else core.NotOpen()

    def _ask_state(self, action: core.AskState) -> core.PeerAnswer:
        try:
            self._connections.pop(action.peer, None)  # it may be somewhere else by now
            offered: OfferedState | HoldfastError = self._peer(action.peer).call(
                GetState(self.name)
            )
        except HoldfastError as err:
            offered = err
        self._began = monotonic_us()
        return peer_answer(action.peer, offered, self._paths, self._staging)

    def _fetch(self, action: core.Fetch) -> core.Fetched | core.FetchFailed:
        piece = action.piece
        try:
            self._peer(action.peer).fetch(piece.name, self._staging.place(piece))
            self._staging.verify(piece)
            return core.Fetched(monotonic_us(), action.round, piece)
        except HoldfastError as err:
            return core.FetchFailed(monotonic_us(), action.round, piece, failure_of(err))

    def _install(self, action: core.Install) -> core.Installed | core.InstallFailed:
        try:
            self._staging.install(self._open_log, self.epoch)
        except HoldfastError as err:
            return core.InstallFailed(monotonic_us(), action.round, failure_of(err))
        self._own.close()
        try:
            self._staging.replace()
        except LogError as err:
            self._stuck = err
        took_ms = (monotonic_us() - self._began) / 1e3
        self.moved = {"bytes": self._staging.bytes, "ms": round(took_ms, 1)}
        return core.Installed(monotonic_us(), action.round)

    def _peer(self, name: str) -> FlightPeer:
        if name not in self._connections:
            self._connections[name] = self._peers[name]()
        return self._connections[name]
