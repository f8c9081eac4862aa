"""Mistakes in subscriptions, nodes, clients and the controller."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

import holdfast.streams.serving
import holdfast.verify.sim.simulated_process
import holdfast.verify.sim.simulated_subscriber
from holdfast.cluster.controller import Controller
from holdfast.core import progress
from holdfast.core.contract_monitor import Monitor
from holdfast.core.subscription import Subscription
from holdfast.core.sunion import SUnion
from holdfast.edge.client import Client
from holdfast.node import executor
from holdfast.node.executor import Performer
from holdfast.node.input_index import InputIndex
from holdfast.node.node_events import Again
from holdfast.node.plans import plan_of
from holdfast.storage import Log
from holdfast.storage.records import State
from holdfast.streams.serving import Service
from holdfast.verify.scenario import Fault
from tests.verify.sim.mutations.planting import mutation

# -- subscriptions --------------------------------------------------------------------------------


@mutation("take a bucket twice after reconnecting", "alive", "wrong", "doubled", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._taken

    def one_less(self: Subscription, event: Any) -> Any:
        return original(self, replace(event, upto=event.upto - 1))

    patch.setattr(Subscription, "_taken", one_less)


@mutation("skip a bucket when reconnecting", "wrong", "lost", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.begin

    def skipping(self: Service, stream: str, from_bucket: int | None, *rest: Any) -> Any:
        begun = original(self, stream, from_bucket, *rest)
        if begun is None or from_bucket is None or begun[0].upto < from_bucket:
            return begun
        first, cursor = begun
        segments = tuple(s for s in first.segments if s.id.bucket > from_bucket)
        paths = first.paths[len(first.paths) - len(segments) :]
        return replace(first, segments=segments, paths=paths), cursor

    patch.setattr(Service, "begin", skipping)


@mutation("skip the checksum of a delivery", "wrong", "lost", "alive", scene="links")
def _(patch: pytest.MonkeyPatch) -> None:
    subscriber = holdfast.verify.sim.simulated_subscriber
    patch.setattr(subscriber, "verified", lambda table, segment, digest: table)


@mutation(
    "declare a bucket complete before it is complete", "alive", "wrong", "lost", scene="silent"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.next

    def hasty(self: Service, stream: str, cursor: Any) -> Any:
        delivery = original(self, stream, cursor)
        return delivery if delivery.ended else replace(delivery, upto=delivery.upto + 1)

    patch.setattr(Service, "next", hasty)


# -- nodes ----------------------------------------------------------------------------------------


@mutation("forget one input at a boundary", "wrong", "lost", "alive", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    def some(self: SUnion) -> int | None:
        boundaries = [upto for upto in self.complete_upto.values() if upto is not None]
        return max(boundaries) if len(boundaries) == len(self.complete_upto) else None

    patch.setattr(SUnion, "all_complete_upto", some)


@mutation("take the first half of a delivery again", "wrong", "lost", "alive", scene="full_backlog")
def _(patch: pytest.MonkeyPatch) -> None:
    original = InputIndex.add

    def piece_by_piece(self: InputIndex, delivery: Any, time: str) -> Any:
        added = []
        for number, segment in enumerate(delivery.segments):
            tables = delivery.tables[number : number + 1]
            added += original(self, replace(delivery, segments=(segment,), tables=tables), time)
        return added

    patch.setattr(InputIndex, "add", piece_by_piece)


@mutation("start replay one bucket too late", "wrong", "lost", "alive", scene="kills")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.wanted

    def late(self: Performer, stream: str) -> int | None:
        wanted = original(self, stream)
        return None if wanted is None else wanted + 1

    patch.setattr(Performer, "wanted", late)


@mutation("ignore how far windows reach back", "alive", "lost", "wrong", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executor, "plan_of", lambda *args: replace(plan_of(*args), extent=0))


@mutation("release all inputs that were processed", "alive", "lost", "wrong", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_needed", lambda self, path: path.position)


@mutation("record a checkpoint one bucket too far", "wrong", "lost", "alive", scene="kills")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.append

    def further(self: Log, *records: Any) -> None:
        original(
            self,
            *(replace(r, bucket=r.bucket + 1) if isinstance(r, State) else r for r in records),
        )

    patch.setattr(Log, "append", further)


@mutation("delete the state that the checkpoint refers to", "alive", "lost", "wrong", scene="kills")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._finished

    def careless(self: Performer, *event: Any) -> Any:
        self.checkpoints.newest.clear()
        return original(self, *event)

    patch.setattr(Performer, "_finished", careless)


@mutation(
    "continue although a full disk blocks an earlier event",
    "lost",
    "alive",
    scene="full_from_the_start",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.take

    def hasty(self: Performer, event: Any) -> None:
        held, self._waiting = self._waiting, deque()
        if isinstance(event, Again) and self._blocked:
            self._waiting = held
            held = deque()
        self._blocked = False
        original(self, event)
        self._waiting.extendleft(reversed(held))
        self._blocked = bool(self._waiting)

    patch.setattr(Performer, "take", hasty)


@mutation("end the stream before the last windows are published", "lost", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executor, "horizon", lambda path, version, *args: version.bucket)


# -- clients and the controller -------------------------------------------------------------------


@mutation("acknowledge before the position is durable", "alive", "lost", scene="full")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def hasty(self: Client, delivery: Any) -> Any:
        held, self.position = self.position, delivery.upto
        self._acknowledge()
        self.position = held
        yield from original(self, delivery)

    patch.setattr(Client, "take", hasty)


@mutation(
    "make the position durable before the application has received the rows",
    "lost",
    scene="torn_client_first",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def hasty(self: Client, delivery: Any) -> Any:
        assert self._log is not None
        if delivery.info is not None:
            self._open(delivery.info)
        if delivery.upto > self._log.info(self.output).complete_upto:
            self._log.commit(self.output, [], delivery.upto)
        yield from original(self, delivery)

    patch.setattr(Client, "take", hasty)


@mutation(
    "continue with the last bucket instead of the next",
    "doubled",
    "undone",
    "order",
    scene="undoing_reader",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.__init__

    def again(self: Client, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.position is not None:
            self.position -= 1

    patch.setattr(Client, "__init__", again)


@mutation("never report a broken promise", "reported", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Monitor, "_tick", lambda self, at, name, output: [])


@mutation("report a broken promise three buckets late", "reported", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Monitor._due_us

    def late(self: Monitor, output: Any) -> int | None:
        due = original(self, output)
        return None if due is None else due + 3 * self.width_us

    patch.setattr(Monitor, "_due_us", late)


@mutation(
    "hand out an epoch before it is durable", "lost", "alive", "wrong", on="pairs-8",
    options_seed=194, slow=True,
    faults=(
        Fault(4_631_000, "pause", "lower.5@2", 2_500_000),
        Fault(5_187_000, "kill", "controller", 300_000),
        Fault(16_953_000, "replace", "lower.4@2", 2_500_000),
        Fault(16_953_000, "replace", "lower.5", 2_500_000),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Controller, name: str, at_least: int = 0) -> int:
        held = self.__dict__.setdefault("held", {})
        held[name] = max(held.get(name, 0) + 1, at_least)
        return int(held[name])

    patch.setattr(Controller, "next_epoch", forgetful)
