"""A node runs one replica of a fragment: one event queue, one loop; `core` decides.

This module is the carrier with threads. One thread reads each input, a pool runs the Spark jobs of
the paths, and the loop passes events to the `Performer`. Consumers subscribe to the log of the
node, and the node acknowledges its inputs upstream."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.clock import monotonic_us
from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.core.divergence import COMPARE_US, Window
from holdfast.core.membership import InstanceStatus
from holdfast.core.subscription import Position, Subscription
from holdfast.engine.engine import Engine
from holdfast.engine.state import Version
from holdfast.errors import (
    HoldfastError,
    InputError,
    InputsLost,
    LogCorrupted,
    LogError,
    SegmentLost,
    TransportError,
)
from holdfast.model.fragments import Fragment, is_pair, local_replica_of
from holdfast.model.trees import tolerance_buckets
from holdfast.node.executor import Performer
from holdfast.node.input_index import InputIndex
from holdfast.node.node_events import (
    Asked,
    DigestsReceived,
    Event,
    Finished,
    Flushed,
    InputDigestsReceived,
    Refused,
    Replied,
    StateAnswer,
    StateAsked,
    StateReleased,
    StateRenewed,
    Work,
)
from holdfast.node.state_lending import offer_of
from holdfast.node.state_transfer import Fingerprints
from holdfast.storage import Log
from holdfast.streams.calls import (
    Done,
    GetDigests,
    GetState,
    OfferedState,
    Postpone,
    Postponement,
    ReleaseState,
    RenewState,
)
from holdfast.streams.delivery import Peer
from holdfast.streams.serving import Service
from holdfast.streams.subscribing import Connections, Subscriber

_log = logging.getLogger("holdfast.node")
#: How long a stop waits for all threads.
STOP_US = 30_000_000


class Node:
    """Runs `fragment`; reads each input from the producers that `upstream` connects to."""

    def __init__(
        self,
        name: str,
        fragment: Fragment,
        engine: Engine,
        log: Log,
        service: Service,
        upstream: Mapping[str, Connections],
        options: Options,
        peers: Connections | None = None,
        *,
        clock: Callable[[], int] = monotonic_us,
    ) -> None:
        self.name, self.fragment, self.engine, self.log = name, fragment, engine, log
        self.upstream, self._peers = upstream, peers or {}
        self._options, self._service, self._clock = options, service, clock
        self._pair = is_pair(engine.network, fragment.name)
        self._sources = {op.name for op in engine.network.sources}
        self.switches: list[tuple[str, int]] = []
        #: The error that stopped the node, and the callback that receives this error.
        self.failure: BaseException | None = None
        self.failed: Callable[[BaseException], object] = lambda err: None
        self._events: queue.Queue[Event | None] = queue.Queue()
        #: Timed events of the loop: due time, number, event. The number keeps events with the same
        #: due time in order.
        self._timers: list[tuple[int, int, Event]] = []
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []
        service.on_damage.append(self._damaged)
        #: Membership as reported by the controller; None stops the thread that handles it.
        self._statuses: queue.Queue[Mapping[str, InstanceStatus] | None] = queue.Queue()
        self._fingerprints = Fingerprints(os.path.join(str(log.root), "state"))
        self._workers = ThreadPoolExecutor(2 * max(1, len(fragment.paths)), "step")
        #: Threads that write checkpoints, one at a time for each path.
        self._flushes: list[threading.Thread] = []
        #: Calls to peers: a peer that does not answer delays no other call.
        self._asking = ThreadPoolExecutor(max(1, 2 * len(self._peers)), "ask")
        self.performer = Performer(
            name, fragment, engine, log, service, self, options,
            inputs=InputIndex(os.path.join(str(log.root), "inputs")), clock=clock,
            peers=tuple(self._peers),
        )  # fmt: skip
        self._subscribers = {stream: self._subscriber(stream) for stream in fragment.inputs}

    def _damaged(self, stream: str, err: LogCorrupted) -> None:
        if stream in self.fragment.outputs:
            self.post(Refused(err))

    def answer_calls(self) -> None:
        """Register the handlers for calls of peers. Used only if the service belongs to this node
        alone: nodes that share a service have no peers."""
        self._service.handle(Postpone, self._postpone)
        self._service.handle(GetDigests, lambda _: self.performer.comparison.digests())
        self._service.handle(GetState, lambda ask: self._offer_state(ask.newcomer))
        self._service.handle(RenewState, lambda ask: self._tell(StateRenewed(ask.newcomer)))
        self._service.handle(ReleaseState, lambda ask: self._tell(StateReleased(ask.newcomer)))

    def start(self) -> None:
        self._thread(self._loop, "node")
        self.post(core.Began(self._clock()))
        self._thread(self._give_up, "membership")
        for peer in self._peers:
            self._thread(partial(self._compare, peer), f"compare-{peer}")
        for stream in self.fragment.inputs:
            self._thread(partial(self._subscribe, stream), f"subscribe-{stream}")

    def stop(self) -> None:
        self._stop.set()
        self._events.put(None)
        self._statuses.put(None)
        until_us = monotonic_us() + STOP_US
        for thread in [*self._threads, *self._flushes]:
            thread.join(timeout=max(0, until_us - monotonic_us()) / 1e6)
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=True)

    @property
    def position(self) -> int | None:
        """The last bucket of the slowest path; None before all paths have started."""
        positions = [state.position for state in self.performer.core.paths.values()]
        begun = [position for position in positions if position is not None]
        return min(begun) if len(begun) == len(positions) else None

    def status(self) -> dict[str, Any]:
        performer = self.performer
        return {
            "node": self.name,
            "fragment": self.fragment.name,
            "epoch": self.log.epoch,
            "failure": str(self.failure) if self.failure else None,
            "trouble": performer.trouble or performer.checkpoints.trouble,
            "differs": performer.comparison.differences,
            "steps": performer.steps,
            "tentative_steps": performer.tentative_steps,
            "switches": len(self.switches),
            "switch_ms": round(self.switches[-1][1] / 1_000, 1) if self.switches else None,
            "jobs": performer.jobs,
            "step_ms": _median_ms(list(performer.step_seconds)[-100:]),
            "checkpoint_ms": _median_ms(performer.checkpoints.seconds),
            "inputs_held": {
                stream: performer.inputs.held(stream) for stream in self.fragment.inputs
            },
            "paths": {
                name: {
                    "position": state.position,
                    "ended": state.ended,
                    "all_complete_upto": state.sunion.all_complete_upto(),
                    "waiting_for": state.sunion.waiting_for(),
                    "state": state.consistency.state,
                    "tentative_upto": state.consistency.position,
                    "state_rows": (
                        performer.versions[name].rows() if name in performer.versions else 0
                    ),
                    "checkpoint": state.durable[0] if state.durable else None,
                    "footprints": state.eventual and state.eventual.status,
                    "convergent": state.plan.convergent,
                }
                for name, state in performer.core.paths.items()
            },
        }

    # -- carrier --------------------------------------------------------------------------------

    def run(self, work: Work, version: Version) -> None:
        self._workers.submit(self._work, work, version)

    def flush(self, version: Version, costs: tuple[float, ...]) -> None:
        # A thread of its own: a disk that does not respond must not hold up steps, nor `stop`.
        thread = threading.Thread(target=self._flush, args=(version, costs), daemon=True)
        self._flushes = [other for other in self._flushes if other.is_alive()] + [thread]
        thread.start()

    def ask(self, asked: Postpone, peers: tuple[str, ...]) -> None:
        for peer in peers:
            self._asking.submit(self._ask, asked, peer)

    def compare_inputs(self, path: str, stream: str) -> None:
        self._thread(partial(self._compare_inputs, path, stream), f"inputs-{path}")

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        self._subscribers[stream].advanced(Position(received, needed, epoch))

    def post(self, event: Event, after_s: float = 0.0) -> None:
        if after_s:
            due = self._clock() + int(1e6 * after_s)
            heapq.heappush(self._timers, (due, next(self._numbers), event))
        else:
            self._events.put(event)

    # -- threads --------------------------------------------------------------------------------

    def _thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"{self.name}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _subscriber(self, stream: str) -> Subscriber:
        last_error: str | None = None

        def lost(err: HoldfastError) -> None:
            nonlocal last_error
            if str(err) != last_error:
                last_error = str(err)
                _log.info("node %s: input %s: %s", self.name, stream, err)
            if isinstance(err, SegmentLost) and stream in self._sources:
                # A node can be rebuilt; data that a source has lost exists nowhere else.
                self.post(Refused(InputsLost(f"source {stream!r}: {err}")))

        producers, options = self.upstream[stream], self._options
        local = local_replica_of(self.name, tuple(producers)) if self._pair else None
        subscription = Subscription(
            tuple(producers), self.performer.wanted(stream), self.performer.tentative,
            local_replica=local,
            tolerance_buckets=tolerance_buckets(self.engine.network, self.fragment.name),
            heartbeat_us=int(1e6 * options.heartbeat_s),
            ask_us=int(1e6 * options.silence_s) if local else 0,
        )  # fmt: skip
        return Subscriber(
            stream, self.name, subscription, producers, self._stop, lost=lost,
            switched=lambda replica, us: self.switches.append((replica, us)),
        )  # fmt: skip

    def _subscribe(self, stream: str) -> None:
        try:
            self._subscribers[stream].run(self.performer.receive)
        except Exception as err:
            self.post(Refused(err))

    def _postpone(self, ask: Postpone) -> Postponement:
        """Handle a peer's request in a server thread; the loop answers."""
        self._check_path(ask.path)
        self._check_replica(ask.peer)
        answers: queue.Queue[Postponement] = queue.Queue()
        self.post(Asked(ask, answers.put))
        try:
            return answers.get(timeout=self._options.silence_s)
        except queue.Empty:
            raise TransportError(f"node {self.name!r} did not answer in time") from None

    def _check_replica(self, name: str) -> None:
        if name not in self._peers:
            names = ", ".join(self._peers) or "none"
            raise InputError(
                f"node {self.name!r}: expected one of its peers ({names}), found {name!r}"
            )

    def _check_path(self, path: str) -> None:
        """Refuse an unknown path in a request: it would stop the loop."""
        names = [known.name for known in self.fragment.paths]
        if path not in names:
            known = ", ".join(names)
            raise InputError(
                f"node {self.name!r}: expected one of its paths ({known}), found {path!r}"
            )

    def _offer_state(self, newcomer: str) -> OfferedState:
        """Offer the current state to a peer that is being rebuilt. The loop continues while this
        thread reads the files for their digests."""
        self._check_replica(newcomer)
        answers: queue.Queue[StateAnswer] = queue.Queue()
        self.post(StateAsked(newcomer, answers.put))
        try:
            answer = answers.get(timeout=self._options.silence_s)
        except queue.Empty:
            raise TransportError(f"node {self.name!r} did not answer in time") from None
        return offer_of(answer, self._fingerprints, lambda: self.post(StateRenewed(newcomer)))

    def _tell(self, event: Event) -> Done:
        self.post(event)
        return Done()

    def heard(self, statuses: Mapping[str, InstanceStatus]) -> None:
        """Membership of the replicas of pairs, as reported by the controller. The calling thread
        also sends the heartbeats, so nothing here may wait for a disk."""
        self._statuses.put(statuses)
        for peer in self._peers:
            status = statuses.get(peer)
            if status is not None and status.gone is not self.performer.core.unpaired:
                self.post(core.Unpaired(self._clock(), status.gone))

    def _give_up(self) -> None:
        """Stop waiting for dead consumers. A failed write is repeated with the next report of the
        controller."""
        while (statuses := self._statuses.get()) is not None:
            while not self._statuses.empty():
                newer = self._statuses.get()
                if newer is None:
                    return
                statuses = newer
            with suppress(LogError, TransportError):
                self._service.lost(statuses, monotonic_us())

    def _compare(self, peer: str) -> None:
        """Fetch the digests of a peer at regular intervals; the loop compares them."""
        remote: Peer | None = None
        while not self._stop.wait(COMPARE_US / 1e6):
            try:
                remote = remote or self._peers[peer]()
                self.post(DigestsReceived(peer, remote.call(GetDigests())))
            except HoldfastError:
                remote = None  # the peer is unreachable, or has moved

    def _compare_inputs(self, path: str, stream: str) -> None:
        inputs = next(
            candidate.inputs for candidate in self.fragment.paths if candidate.name == path
        )
        windows: dict[str, dict[str, Window]] = {}
        for name in inputs:
            with suppress(HoldfastError, KeyError):
                windows[name] = {
                    producer: connect().call(GetDigests()).windows[name]
                    for producer, connect in self.upstream[name].items()
                }
        self.post(InputDigestsReceived(stream, windows))

    def _ask(self, request: Postpone, peer: str) -> None:
        try:
            reply: Postponement | HoldfastError = self._peers[peer]().call(request)
        except HoldfastError as err:
            reply = err
        self.post(Replied(request, peer, reply))

    def _work(self, work: Work, version: Version) -> None:
        began = monotonic_us()
        after, error = None, None
        try:
            after = self.performer.step(work, version)
        except BaseException as err:
            error = err
        self.post(Finished(work, after, (monotonic_us() - began) / 1e6, error))

    def _flush(self, version: Version, costs: tuple[float, ...]) -> None:
        began = monotonic_us()
        new_entries, error = 0, None
        try:
            new_entries = self.performer.flush(version, costs)
        except BaseException as err:
            error = err
        self.post(Flushed(version, new_entries, (monotonic_us() - began) / 1e6, error))

    def _next(self) -> Event | None:
        """The next event that is due or has arrived; None: the node stops."""
        while True:
            wait_s = None
            if self._timers:
                wait_s = (self._timers[0][0] - self._clock()) / 1e6
                if wait_s <= 0:
                    return heapq.heappop(self._timers)[2]
            with suppress(queue.Empty):
                return self._events.get(timeout=wait_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            event = self._next()
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
            _log.error("node %s stopped by an internal error; please report it with this log",
                       self.name, exc_info=err)  # fmt: skip
        self._stop.set()
        self.failed(err)
        self.ended.set()


def _median_ms(seconds: Collection[float]) -> float | None:
    return round(1_000 * sorted(seconds)[len(seconds) // 2], 1) if seconds else None
