"""A node: one process part that runs a fragment. One queue, one loop; the core decides.

Threads only carry: one follows each input, one per path runs Spark jobs, the loop hands events to
the `Performer`. What the node logs, others follow; what it no longer needs, it says upstream."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.clock import monotonic_us, now_us
from holdfast.config import Options
from holdfast.core import progress as core
from holdfast.core.consistency import Answer, together
from holdfast.core.membership import Standing
from holdfast.core.transfer import BeganEmpty, NotReady
from holdfast.engine.engine import Engine
from holdfast.engine.state import Version
from holdfast.errors import (
    HoldfastError,
    InputError,
    InputsLost,
    LogCorrupted,
    LogError,
    ProtocolViolation,
    SegmentLost,
    StorageFull,
    TransportError,
)
from holdfast.model.fragments import Fragment, home_of, is_pair
from holdfast.node.effects import (
    Asked,
    Event,
    Finished,
    Refused,
    StateAnswer,
    StateAsked,
    StateReleased,
    StateRenewed,
    Work,
)
from holdfast.node.executor import FULL_S, Performer
from holdfast.node.input_index import InputIndex
from holdfast.node.state_transfer import Fingerprints
from holdfast.storage import Log
from holdfast.streams.calls import (
    Correction,
    Done,
    GetCorrection,
    GetState,
    OfferedState,
    Position,
    Postpone,
    Postponement,
    ReleaseState,
    RenewState,
)
from holdfast.streams.delivery import Peer
from holdfast.streams.serving import Service
from holdfast.streams.subscribing import Makers, follow

_log = logging.getLogger("holdfast.node")


class Node:
    """Runs `fragment`; reads each input from the peer that `upstream` connects to."""

    def __init__(
        self,
        name: str,
        fragment: Fragment,
        engine: Engine,
        log: Log,
        service: Service,
        upstream: Mapping[str, Makers],
        options: Options,
        partners: Makers | None = None,
    ) -> None:
        self.name, self.fragment, self.engine, self.log = name, fragment, engine, log
        self.upstream, self._partners = upstream, partners or {}
        self._options, self._service = options, service
        self._pair = is_pair(engine.network, fragment.name)
        self._sources = {op.name for op in engine.network.sources}
        #: Where each input with several makers is: said to all of them.
        self._positions: dict[str, Position] = {}
        self.switches: list[tuple[str, int]] = []
        #: What ended the node, if anything did.
        self.failure: BaseException | None = None
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._stop = threading.Event()
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._peers: dict[str, Peer] = {}
        #: Positions to be said upstream. A peer that cannot be reached must not hold up the loop.
        self._acks: dict[str, queue.Queue[tuple[int, int, int] | None]] = {
            stream: queue.Queue() for stream in fragment.inputs
        }
        service.on_damage.append(self._damaged)
        #: Who is dead, as the controller says; None ends the thread that acts on it.
        self._standings: queue.Queue[Mapping[str, Standing] | None] = queue.Queue()
        self._fingerprints = Fingerprints(os.path.join(str(log.root), "state"))
        self._workers = ThreadPoolExecutor(2 * max(1, len(fragment.paths)), "step")
        self.performer = Performer(
            name, fragment, engine, log, service, self, options,
            inputs=InputIndex(os.path.join(str(log.root), "inputs")), clock=now_us,
            partners=tuple(self._partners),
        )  # fmt: skip

    def _damaged(self, stream: str, err: LogCorrupted) -> None:
        if stream in self.fragment.outputs:
            self.post(Refused(err))

    def answer_calls(self) -> None:
        """Of other replicas. Only where the service is the node's own: nodes that share one have no
        other replicas."""
        self._service.handle(Postpone, self._postpone)
        self._service.handle(GetCorrection, self._correction)
        self._service.handle(GetState, lambda ask: self._offer_state(ask.newcomer))
        self._service.handle(RenewState, lambda ask: self._tell(StateRenewed(ask.newcomer)))
        self._service.handle(ReleaseState, lambda ask: self._tell(StateReleased(ask.newcomer)))

    def start(self) -> None:
        self._thread(self._loop, "node")
        self._thread(self._give_up, "membership")
        for stream in self.fragment.inputs:
            self._thread(partial(self._follow, stream), f"follow-{stream}")
            self._thread(partial(self._say, stream), f"say-{stream}")

    def stop(self) -> None:
        self._stop.set()
        self._events.put(None)
        for acks in self._acks.values():
            acks.put(None)
        self._standings.put(None)
        for thread in self._threads:
            thread.join(timeout=30)
        self._workers.shutdown(wait=True)

    @property
    def position(self) -> int | None:
        """The last bucket of its slowest path; None before all have begun."""
        found = [state.position for state in self.performer.core.paths.values()]
        begun = [position for position in found if position is not None]
        return min(begun) if len(begun) == len(found) else None

    def status(self) -> dict[str, Any]:
        does = self.performer
        recent = list(does.step_seconds)[-100:]
        return {
            "node": self.name,
            "fragment": self.fragment.name,
            "epoch": self.log.epoch,
            "failure": str(self.failure) if self.failure else None,
            "trouble": does.trouble,
            "steps": does.steps,
            "tentative_steps": does.tentative_steps,
            "switches": len(self.switches),
            "switch_ms": round(self.switches[-1][1] / 1_000, 1) if self.switches else None,
            "jobs": does.jobs,
            "step_ms": round(1_000 * sorted(recent)[len(recent) // 2], 1) if recent else None,
            "inputs_held": {stream: does.inputs.held(stream) for stream in self.fragment.inputs},
            "paths": {
                name: {
                    "position": state.position,
                    "whole_upto": state.sunion.whole_upto(),
                    "waiting_for": state.sunion.waiting_for(),
                    "state": state.consistency.state,
                    "tentative_upto": state.consistency.position,
                    "state_rows": does.versions[name].rows() if name in does.versions else 0,
                    "checkpoint": state.durable[0] if state.durable else None,
                    "convergent": state.plan.convergent,
                }
                for name, state in does.core.paths.items()
            },
        }

    # -- carrying -------------------------------------------------------------------------------

    def run(self, work: Work, version: Version) -> None:
        self._workers.submit(self._work, work, version)

    def ask(self, path: str, partners: tuple[str, ...]) -> None:
        self._thread(partial(self._ask, path, partners), f"ask-{path}")

    def watch(self, path: str, partner: str) -> None:
        self._thread(partial(self._watch, path, partner), f"watch-{path}")

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        self._positions[stream] = (self.name, received, needed, epoch)
        if len(self.upstream[stream]) == 1:
            self._acks[stream].put((received, needed, epoch))

    def post(self, event: Event, after_s: float = 0.0) -> None:
        if after_s:
            timer = threading.Timer(after_s, self._events.put, (event,))
            timer.daemon = True
            timer.start()
        else:
            self._events.put(event)

    # -- threads --------------------------------------------------------------------------------

    def _thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"{self.name}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, stream: str) -> None:
        said: str | None = None

        def connected(peer: Peer) -> None:
            self._peers[stream] = peer

        def lost(err: Exception) -> None:
            nonlocal said
            if str(err) != said:
                said = str(err)
                _log.info("node %s: input %s: %s", self.name, stream, err)
            if isinstance(err, SegmentLost) and stream in self._sources:
                # A node is rebuilt; what a source has lost, nobody has.
                self.post(Refused(InputsLost(f"source {stream!r}: {err}")))

        following = self.performer.following[stream]
        home = home_of(self.name, tuple(self.upstream[stream])) if self._pair else None
        while not self._stop.is_set():
            try:
                for delivery in follow(
                    stream, following, self.upstream[stream], self._stop,
                    connected=connected, lost=lost,
                    position=lambda: self._positions.get(stream),
                    switched=lambda replica, us: self.switches.append((replica, us)),
                    heartbeat_s=self._options.heartbeat_s, home=home,
                    ask_s=self._options.silence_s if home else None,
                ):  # fmt: skip
                    if delivery.info is not None and stream in self._positions:
                        # Whoever speaks may be new, and not know how far we are.
                        self._acks[stream].put(self._positions[stream][1:])
                    self.performer.receive(delivery)
                return
            except StorageFull as err:  # what could not be taken is delivered again
                _log.warning("node %s: input %s waits for space: %s", self.name, stream, err)
                self._stop.wait(FULL_S)
            except Exception as err:
                self.post(Refused(err))
                return

    def _say(self, stream: str) -> None:
        """Only the newest positions matter: what waited behind a slow answer is skipped."""
        acks = self._acks[stream]
        while (position := acks.get()) is not None:
            while not acks.empty():
                newer = acks.get()
                if newer is None:
                    return
                position = newer
            peer = self._peers.get(stream)
            if peer is None:
                continue
            try:
                peer.acknowledge(stream, self.name, *position)
            except TransportError:
                pass  # said again with the next step
            except Exception as err:
                self.post(Refused(err))
                return

    def _postpone(self, ask: Postpone) -> Postponement:
        """By a partner, in one of the server's threads; the loop answers."""
        self._check_path(ask.path)
        self._check_replica(ask.partner)
        answers: queue.Queue[Answer] = queue.Queue()
        self.post(Asked(ask.path, ask.partner, answers.put))
        try:
            return Postponement(answers.get(timeout=self._options.silence_s))
        except queue.Empty:
            raise TransportError(f"node {self.name!r} does not answer") from None

    def _correction(self, ask: GetCorrection) -> Correction:
        self._check_path(ask.path)
        return Correction(self.performer.correcting(ask.path))

    def _check_replica(self, name: str) -> None:
        if name not in self._partners:
            known = ", ".join(self._partners) or "none"
            raise InputError(
                f"node {self.name!r}: expected one of its replicas ({known}), found {name!r}"
            )

    def _check_path(self, path: str) -> None:
        """What another process names may not be here; the loop would end with it."""
        names = [known.name for known in self.fragment.paths]
        if path not in names:
            known = ", ".join(names)
            raise InputError(f"node {self.name!r}: expected one of paths {known}, found {path!r}")

    def _offer_state(self, newcomer: str) -> OfferedState:
        """Another copy is caught up, from what this one knows now. The loop goes on while the files
        are read for their digests."""
        self._check_replica(newcomer)
        answers: queue.Queue[StateAnswer] = queue.Queue()
        self.post(StateAsked(newcomer, answers.put))
        try:
            answer = answers.get(timeout=self._options.silence_s)
        except queue.Empty:
            raise TransportError(f"node {self.name!r} does not answer") from None
        match answer:
            case BeganEmpty():
                return OfferedState("began-empty")
            case NotReady():
                return OfferedState("not-ready", why=answer.why)
            case _:
                return OfferedState("state", answer, self._fingerprints.of(answer))

    def _tell(self, event: Event) -> Done:
        self.post(event)
        return Done()

    def heard(self, standings: Mapping[str, Standing]) -> None:
        """What the controller says of those that are one of a pair. Whoever tells sends the
        heartbeats, so nothing here may wait for a disk."""
        self._standings.put(standings)
        for partner in self._partners:
            known = standings.get(partner)
            if known is not None and known.gone is not self.performer.core.alone:
                self.post(core.Alone(now_us(), known.gone))

    def _give_up(self) -> None:
        """Readers that are dead are not waited for. What cannot be written now is said again."""
        while (standings := self._standings.get()) is not None:
            while not self._standings.empty():
                newer = self._standings.get()
                if newer is None:
                    return
                standings = newer
            with suppress(LogError, TransportError):
                self._service.lost(standings, monotonic_us())

    def _ask(self, path: str, partners: tuple[str, ...]) -> None:
        answers: list[Answer] = []
        for partner in partners:
            try:
                peer = self._partners[partner]()
                answers.append(peer.call(Postpone(path, self.name)).answer)
            except HoldfastError:
                answers.append("alone")
        self.post(core.Answered(now_us(), path, together(answers)))

    def _watch(self, path: str, partner: str) -> None:
        try:
            peer = self._partners[partner]()
            while peer.call(GetCorrection(path)).correcting:
                if self._stop.wait(self._options.heartbeat_s):
                    return
        except HoldfastError:
            pass
        self.post(core.Postponed(now_us(), path, None))

    def _work(self, work: Work, version: Version) -> None:
        began = now_us()
        after, error = None, None
        try:
            after = self.performer.step(work, version)
        except BaseException as err:
            error = err
        self.post(Finished(work, after, (now_us() - began) / 1e6, error))

    def _loop(self) -> None:
        while not self._stop.is_set():
            event = self._events.get()
            if event is None:
                return
            try:
                self.performer.take(event)
                if self.performer.ended:
                    self.ended.set()
            except Exception as err:
                self._fail(err)
                return

    def _fail(self, err: BaseException) -> None:
        self.failure = err
        if isinstance(err, HoldfastError):
            _log.error("node %s stopped: %s", self.name, err)
        else:
            _log.error("node %s stopped by a fault of its own", self.name, exc_info=err)
            if not isinstance(err, ProtocolViolation):
                _log.error("please report this with the log of the node")
        self._stop.set()
        self.ended.set()
