"""Drives the catch-up of a simulated copy (`core.catch_up`) in virtual time, piece by piece, so
that anything may fail between two of them. Nothing is decided here."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.core import transfer as core
from holdfast.core.catch_up import CatchUp
from holdfast.errors import HoldfastError, LogError, StaleEpoch, StateLost
from holdfast.model.fragments import partners_of, producers_of
from holdfast.node.effects import StateReleased, StateRenewed
from holdfast.node.state_transfer import (
    Staging,
    failure_of,
    not_held,
    own_paths,
    peer_answer,
)
from holdfast.storage.files import put_file
from holdfast.streams.calls import OfferedState
from holdfast.verify.sim.engine_twin import EngineTwin
from holdfast.verify.sim.members import memory_log

if TYPE_CHECKING:
    from holdfast.verify.sim.nodes import NodeProcess

#: At most so long all pieces together are on their way, beside what the links take.
MOVING_US = 1_500_000


class Rebuild:
    def __init__(self, node: NodeProcess, staging: Staging) -> None:
        self._node, self._staging = node, staging
        made_by = producers_of(node.network)
        engine = EngineTwin(node.network, node.disk, f"/{node.name}/state")
        own = own_paths(node.log, node.fragment.paths, engine.check)
        producers = {stream: made_by[stream] for stream in node.fragment.inputs}
        self.core = CatchUp(node.name, partners_of(node.network, node.name), producers, own)
        self._pieces = 1

    def begin(self) -> None:
        self._node.host.wake()  # the peer may ask what this copy has
        self._take(core.Begin(self._now))

    @property
    def _now(self) -> int:
        return self._node.world.now

    def _take(self, event: core.Event) -> None:
        for action in self.core.handle(event):
            self._perform(action)

    def _perform(self, action: core.Action) -> None:
        node = self._node
        match action:
            case core.Wake():
                node.after(max(0, action.at - self._now), lambda: self._take(core.Tick(self._now)))
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
                self._install(action)
            case core.Discard():
                with suppress(LogError):
                    self._staging.discard()
            case core.ComeUp():
                node.world.say(node.name, "comes up from", action.source, f"({action.why})")
                node.caught_up(reopen=action.source == "peer")
            case core.GiveUp():
                raise (StaleEpoch if action.replaced else StateLost)(action.why)

    def _hold(self, action: core.Hold) -> None:
        node, epoch = self._node, self._node.log.epoch

        def over(answer: core.HoldAnswer) -> None:
            self._take(
                core.HoldAnswered(self._now, action.round, action.stream, action.producer, answer)
            )

        node.ask_node(
            action.producer,
            lambda server: server.service.hold(action.stream, node.name, epoch, server.world.now),
            over,
            lambda err: over(not_held(err)),
        )

    def _ask_state(self, action: core.AskState) -> None:
        node = self._node

        def over(reply: OfferedState | HoldfastError) -> None:
            answer = peer_answer(action.peer, reply, node.fragment.paths, self._staging)
            if isinstance(answer, core.HasState):
                self._pieces = max(1, len(answer.pieces))
            self._take(core.PeerAnswered(self._now, action.round, answer))

        node.ask_node(
            action.peer, lambda peer: peer.offer_state(node.name), over, over, catching_up=True
        )

    def _fetch(self, action: core.Fetch) -> None:
        node, piece = self._node, action.piece

        def came(data: bytes) -> None:
            try:
                put_file(self._staging.place(piece), data, fsync=False, disk=node.disk)
                self._staging.verify(piece)
            except HoldfastError as err:
                failed(err)
            else:
                self._take(core.Fetched(self._now, action.round, piece))

        def failed(err: HoldfastError) -> None:
            self._take(core.FetchFailed(self._now, action.round, piece, failure_of(err)))

        def told(data: bytes) -> None:
            link = node.wire.link(action.peer, node.name)
            if link.damage and node.wire.chance.random() < 0.3:
                data = data[:-1] + bytes([data[-1] ^ 1])
            took_us = MOVING_US * node.chance.random() ** 2 / self._pieces
            node.after(int(took_us), lambda: came(data))

        node.ask_node(action.peer, lambda peer: peer.piece(piece.name), told, failed)

    def _tell(self, peer: str, event: StateRenewed | StateReleased) -> None:
        self._node.ask_node(
            peer, lambda node: node.performer.take(event), lambda _: None, lambda err: None
        )

    def _install(self, action: core.Install) -> None:
        node = self._node
        try:
            self._staging.install(
                lambda folder: memory_log(node, node.name, folder), node.log.epoch
            )
        except HoldfastError as err:
            self._take(core.InstallFailed(self._now, action.round, failure_of(err)))
            return
        with suppress(HoldfastError):
            node.log.close()
        self._staging.replace()
        self._take(core.Installed(self._now, action.round))
