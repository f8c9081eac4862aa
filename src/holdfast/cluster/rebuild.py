"""Drives the catch-up of a replica (`core.catch_up`) with threads. Slow actions run in worker
threads; their results return as events (`node.transfer_events`). This module decides nothing."""

from __future__ import annotations

import heapq
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from holdfast.clock import monotonic_us
from holdfast.core import catch_up_events as core
from holdfast.core.catch_up import CatchUp
from holdfast.errors import HoldfastError, LogError, TransportError
from holdfast.model.fragments import Path
from holdfast.node.state_transfer import Staging
from holdfast.node.transfer_events import (
    Began,
    Broke,
    FetchEnded,
    HoldReplied,
    Rang,
    RawEvent,
    StateReplied,
    Translation,
    install,
    reason_to_stop,
)
from holdfast.storage import Log
from holdfast.streams.calls import GetState, Hold, Holding, OfferedState, ReleaseState, RenewState
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer

_log = logging.getLogger("holdfast.node")
Connect = Callable[[], FlightPeer]
#: Interval at which the loop checks whether to stop.
LOOK_S = 0.2


class Rebuild:
    """Catch-up of one replica with the open log `own`. After `run`, this log is still open, or, if
    the state of the peer replaced it, closed."""

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
        clock: Callable[[], int] = monotonic_us,
    ) -> None:
        self.name, self.epoch, self._clock = name, epoch, clock
        self._translation = Translation(name, paths, staging)
        self._own, self._open_log, self._staging = own, open_log, staging
        self._producers, self._peers, self._stop = producers, peers, stop
        names = {stream: tuple(connects) for stream, connects in producers.items()}
        self._core = CatchUp(name, tuple(peers), names, own_paths)
        self._happened: queue.Queue[RawEvent] = queue.Queue()
        self._wakes: list[int] = []
        self._connections: dict[str, FlightPeer] = {}
        self._workers = ThreadPoolExecutor(8, f"rebuild-{name}")
        # A peer that is catching up, too, may ask for the state of this replica.
        service = Service()
        service.handle(GetState, lambda _: OfferedState("waits", own=self._core.as_peer().own))
        self._server = FlightServer(service, listen_on, 0)
        #: Monotonic time at which the peer offered its state, in microseconds.
        self._began = 0
        #: The last problem that was logged.
        self._said: str | None = None
        #: Size and duration of the state transfer, if the replica was rebuilt from its peer.
        self.moved: dict[str, float] | None = None

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def trouble(self) -> str | None:
        return self._core.trouble

    def run(self) -> core.ComeUp:
        """Run until the replica can start; raises the reason if it cannot."""
        try:
            comes_up = self.step(Began())
            while comes_up is None:
                comes_up = self.step(self._next())
            _log.info("node %s starts, state from %s: %s", self.name, comes_up.source, comes_up.why)
            return comes_up
        finally:
            for peer in self._connections.values():
                peer.close()
            self._workers.shutdown(wait=True)
            self._server.stop()

    def _next(self) -> RawEvent:
        while not self._stop.is_set():
            now = self._clock()
            if self._wakes and self._wakes[0] <= now:
                heapq.heappop(self._wakes)
                return Rang()
            due_s = (self._wakes[0] - now) / 1e6 if self._wakes else LOOK_S
            with suppress(queue.Empty):
                return self._happened.get(timeout=min(due_s, LOOK_S))
        raise TransportError("the node was stopped before it had started")

    # -- events in, actions performed -------------------------------------------------------------

    def step(self, raw: RawEvent) -> core.ComeUp | None:
        """Handle one event and perform its actions. Returns `ComeUp` when the replica can start."""
        for action in self._core.handle(self._translation.event(raw, self._clock())):
            if isinstance(action, core.ComeUp):
                return action
            self._perform(action)
        if self._core.trouble not in (None, self._said):
            self._said = self._core.trouble
            _log.info("node %s waits to catch up: %s", self.name, self._said)
        return None

    def _perform(self, action: core.Action) -> None:
        match action:
            case core.Wake():
                heapq.heappush(self._wakes, action.at)
            case core.Discard():
                with suppress(LogError):
                    self._staging.discard()
            case core.GiveUp():
                raise reason_to_stop(action)
            case _:
                self._workers.submit(self._carry_out, action)

    # -- in threads of their own ------------------------------------------------------------------

    def _carry_out(self, action: core.Action) -> None:
        try:
            self._carry(action)
        except Exception as err:  # lost in the thread pool, and the replica would wait forever
            self._happened.put(Broke(err))

    def _carry(self, action: core.Action) -> None:
        match action:
            case core.Hold():
                self._happened.put(HoldReplied(action, self._hold(action)))
            case core.AskState():
                self._happened.put(StateReplied(action, self._ask_state(action)))
            case core.Fetch():
                self._happened.put(self._fetch(action))
            case core.Install():
                ended = install(action, self._staging, self._open_log, self._own, self.epoch)
                took_ms = (self._clock() - self._began) / 1e3
                self.moved = {"bytes": self._staging.bytes, "ms": round(took_ms, 1)}
                self._happened.put(ended)
            case core.Renew():
                with suppress(HoldfastError):
                    self._peer(action.peer).call(RenewState(self.name))
            case core.Release():
                with suppress(HoldfastError):
                    self._peer(action.peer).call(ReleaseState(self.name))

    def _hold(self, action: core.Hold) -> Holding | HoldfastError:
        try:
            peer = self._producers[action.stream][action.producer]()
            try:
                return peer.call(Hold(action.stream, self.name, self.epoch))
            finally:
                peer.close()
        except HoldfastError as err:
            return err

    def _ask_state(self, action: core.AskState) -> OfferedState | HoldfastError:
        try:
            self._connections.pop(action.peer, None)  # the address of the peer may have changed
            offered = self._peer(action.peer).call(GetState(self.name))
        except HoldfastError as err:
            return err
        self._began = self._clock()
        return offered

    def _fetch(self, action: core.Fetch) -> FetchEnded:
        piece = action.piece
        try:
            self._peer(action.peer).fetch(piece.name, self._staging.place(piece))
            self._staging.verify(piece)
        except HoldfastError as err:
            return FetchEnded(action, err)
        return FetchEnded(action)

    def _peer(self, name: str) -> FlightPeer:
        if name not in self._connections:
            self._connections[name] = self._peers[name]()
        return self._connections[name]
