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

from holdfast.clock import now_us
from holdfast.config import Options
from holdfast.core import progress as core
from holdfast.core.consistency import Answer, together
from holdfast.core.membership import Standing, dead_of
from holdfast.engine.engine import Engine
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, ProtocolViolation, StorageFull, TransportError
from holdfast.model.fragments import Fragment, home_of, is_pair
from holdfast.node.effects import Asked, Event, Finished, Refused, Wanted, Work
from holdfast.node.executor import FULL_S, Performer
from holdfast.node.input_index import InputIndex
from holdfast.node.state_transfer import Moving, moving_body
from holdfast.storage import Log
from holdfast.streams.delivery import Peer
from holdfast.streams.serving import Service
from holdfast.streams.subscribing import Makers, Position, follow

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
        #: Where each input with several makers is: said to all of them.
        self._positions: dict[str, Position] = {}
        self.switches: list[tuple[str, int]] = []
        #: What ended the node, if anything did; and who is told of it.
        self.failure: BaseException | None = None
        self.failed: Callable[[BaseException], object] = lambda err: None
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._stop = threading.Event()
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._peers: dict[str, Peer] = {}
        #: Positions to be said upstream. A peer that cannot be reached must not hold up the loop.
        self._acks: dict[str, queue.Queue[tuple[int, int, int] | None]] = {
            stream: queue.Queue() for stream in fragment.inputs
        }
        self._workers = ThreadPoolExecutor(2 * max(1, len(fragment.paths)), "step")
        self.performer = Performer(
            name, fragment, engine, log, service, self, options,
            inputs=InputIndex(os.path.join(str(log.root), "inputs")), clock=now_us,
            partners=tuple(self._partners),
        )  # fmt: skip
        service.calls["postpone"] = self._asked
        service.calls["give"] = self._wanted
        service.calls["given"] = self._given
        service.calls["correcting"] = lambda body: {
            "correcting": self.performer.correcting(body["path"])
        }

    def start(self) -> None:
        self._thread(self._loop, "node")
        for stream in self.fragment.inputs:
            self._thread(partial(self._follow, stream), f"follow-{stream}")
            self._thread(partial(self._say, stream), f"say-{stream}")

    def stop(self) -> None:
        self._stop.set()
        self._events.put(None)
        for acks in self._acks.values():
            acks.put(None)
        for thread in self._threads:
            thread.join(timeout=30)
        self._workers.shutdown(wait=True)

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

    def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """By a partner, in one of the server's threads; the loop answers."""
        answers: queue.Queue[Answer] = queue.Queue()
        self.post(Asked(body["path"], body["partner"], answers.put))
        try:
            return {"answer": answers.get(timeout=self._options.silence_s)}
        except queue.Empty:
            raise TransportError(f"node {self.name!r} does not answer") from None

    def _wanted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The partner is made anew, from what this one knows now."""
        answers: queue.Queue[list[Moving] | None] = queue.Queue()
        self.post(Wanted(answers.put))
        try:
            found = answers.get(timeout=self._options.silence_s)
        except queue.Empty:
            raise TransportError(f"node {self.name!r} does not answer") from None
        return {"paths": None if found is None else [moving_body(moving) for moving in found]}

    def _given(self, body: dict[str, Any]) -> dict[str, Any]:
        self.performer.given()
        return {}

    def heard(self, standings: Mapping[str, Standing]) -> None:
        """What the controller says of those that are one of a pair."""
        with suppress(StorageFull, TransportError):
            self._service.lost(dead_of(standings))
        for partner in self._partners:
            known = standings.get(partner)
            if known is not None and known.gone is not self.performer.core.alone:
                self.post(core.Alone(now_us(), known.gone))

    def _ask(self, path: str, partners: tuple[str, ...]) -> None:
        answers: list[Answer] = []
        for partner in partners:
            asked = {"path": path, "partner": self.name}
            try:
                answers.append(self._partners[partner]().call("postpone", asked)["answer"])
            except HoldfastError:
                answers.append("alone")
        self.post(core.Answered(now_us(), path, together(answers)))

    def _watch(self, path: str, partner: str) -> None:
        try:
            peer = self._partners[partner]()
            while peer.call("correcting", {"path": path})["correcting"]:
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
        self.failed(err)
        self.ended.set()
