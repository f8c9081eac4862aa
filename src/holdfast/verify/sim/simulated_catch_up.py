"""Drives the catch-up of a simulated replica (`core.catch_up`) in virtual time, piece by piece, so
that a fault may occur between any two pieces. All decisions are made in `core.catch_up`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.core import catch_up_events as core
from holdfast.core.catch_up import CatchUp
from holdfast.errors import HoldfastError, LogError
from holdfast.model.fragments import peers_of, producers_of
from holdfast.node.node_events import StateReleased, StateRenewed
from holdfast.node.state_transfer import Staging, own_paths
from holdfast.node.transfer_events import (
    Began,
    FetchEnded,
    HoldReplied,
    Rang,
    RawEvent,
    StateReplied,
    Translation,
    install,
    reason_to_stop,
)
from holdfast.storage.files import put_file
from holdfast.streams.calls import Hold, Holding, OfferedState
from holdfast.verify.sim.simulated_engine import EngineTwin
from holdfast.verify.sim.simulated_process import memory_log

if TYPE_CHECKING:
    from holdfast.verify.sim.nodes import NodeProcess

#: Maximum transfer time of all pieces together, in addition to link delays.
MOVING_US = 1_500_000


class Rebuild:
    def __init__(self, node: NodeProcess, staging: Staging) -> None:
        self._node, self._staging = node, staging
        all_producers = producers_of(node.network)
        engine = EngineTwin(node.network, node.disk, f"/{node.name}/state")
        own = own_paths(node.log, node.fragment.paths, engine.check)
        producers = {stream: all_producers[stream] for stream in node.fragment.inputs}
        self.core = CatchUp(node.name, peers_of(node.network, node.name), producers, own)
        self._translation = Translation(node.name, node.fragment.paths, staging)
        #: Address of each peer when its state was requested. Later requests go to the same address,
        #: also while the controller is down.
        self._addresses: dict[str, str | None] = {}

    def begin(self) -> None:
        self._node.host.wake()  # the peer may ask for the state of this replica
        self.step(Began())

    @property
    def _now(self) -> int:
        return self._node.world.now

    def step(self, raw: RawEvent) -> None:
        for action in self.core.handle(self._translation.event(raw, self._now)):
            self._perform(action)

    def _perform(self, action: core.Action) -> None:
        node = self._node
        match action:
            case core.Wake():
                node.after(max(0, action.at - self._now), lambda: self.step(Rang()))
            case core.Hold():
                self._hold(action)
            case core.AskState():
                self._ask_state(action)
            case core.Fetch():
                self._fetch(action)
            case core.Renew():
                self._tell(action.peer, StateRenewed(node.name))
            case core.Release():
                self._tell(action.peer, StateReleased(node.name))
            case core.Install():
                open_log = partial(memory_log, node, node.name)
                self.step(install(action, self._staging, open_log, node.log, node.log.epoch))
            case core.Discard():
                with suppress(LogError):
                    self._staging.discard()
            case core.ComeUp():
                node.world.say(node.name, "caught up, state from", action.source, f"({action.why})")
                node.caught_up(reopen=action.source == "peer")
            case core.GiveUp():
                raise reason_to_stop(action)

    def _hold(self, action: core.Hold) -> None:
        request = Hold(action.stream, self._node.name, self._node.log.epoch)

        def replied(reply: Holding | HoldfastError) -> None:
            self.step(HoldReplied(action, reply))

        self._node.ask_node(
            action.producer,
            lambda server: server.service.held(request, server.world.now),
            replied,
            replied,
        )

    def _ask_state(self, action: core.AskState) -> None:
        node = self._node

        def replied(reply: OfferedState | HoldfastError) -> None:
            self.step(StateReplied(action, reply))

        def located(address: str | None) -> None:
            self._addresses[action.peer] = address
            self._ask(action.peer, lambda peer: peer.offer_state(node.name), replied, replied)

        node.locate(action.peer, located, replied, catching_up=True)

    def _fetch(self, action: core.Fetch) -> None:
        node, piece = self._node, action.piece

        def store(data: bytes) -> None:
            try:
                put_file(self._staging.place(piece), data, fsync=False, disk=node.disk)
                self._staging.verify(piece)
            except HoldfastError as err:
                failed(err)
            else:
                self.step(FetchEnded(action))

        def failed(err: HoldfastError) -> None:
            self.step(FetchEnded(action, err))

        def received(data: bytes) -> None:
            link = node.wire.link(action.peer, node.name)
            if link.damage and node.wire.chance.random() < 0.3:
                data = data[:-1] + bytes([data[-1] ^ 1])
            took_us = MOVING_US * node.chance.random() ** 2 / len(self._staging.pieces)
            node.after(int(took_us), lambda: store(data))

        self._ask(action.peer, lambda peer: peer.piece(piece.name), received, failed)

    def _tell(self, peer: str, event: StateRenewed | StateReleased) -> None:
        self._ask(peer, lambda node: node.performer.take(event), lambda _: None, lambda err: None)

    def _ask(
        self,
        peer: str,
        ask: Callable[[Any], Any],
        received: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        self._node.ask_at(self._addresses.get(peer), peer, ask, received, failed)
