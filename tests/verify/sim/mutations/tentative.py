"""Mistakes in tentative results and their correction (Borealis DPC)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.core.consistency
from holdfast.core import progress
from holdfast.core.consistency import Consistency
from holdfast.core.correction_leases import Promises
from holdfast.core.subscription import Subscription
from holdfast.core.sunion import SUnion
from holdfast.edge.client import Client
from holdfast.engine.state import Line
from holdfast.node.executor import Performer
from holdfast.node.input_index import Best
from holdfast.storage import log_state
from holdfast.storage.records import Added, Boundary
from holdfast.streams.soutput import SOutput
from holdfast.types import SegmentId, Stability
from tests.verify.sim.mutations.planting import mutation


@mutation("treat tentative buckets as stable", "wrong", "undone", "order", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def gullible(self: Client, delivery: Any) -> Any:
        stable = tuple(replace(s, stability=Stability.STABLE) for s in delivery.segments)
        yield from original(self, replace(delivery, segments=stable))

    patch.setattr(Client, "take", gullible)


@mutation("acknowledge tentative buckets", "lost", "wrong", "corrected", "alive", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._taken

    def received(self: Subscription, event: Any) -> Any:
        upto = event.upto if event.tentative_upto is None else event.tentative_upto
        return original(self, replace(event, upto=max(event.upto, upto)))

    patch.setattr(Subscription, "_taken", received)


@mutation("correct results from the diverged state", "wrong", "converge", scene="failure_cut")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._finished_tentative

    def diverged(self: Performer, run: Any, event: Any, at: int) -> Any:
        if event.version is not None and self.soutput.lines.get(run.path) == run.line:
            before = self.versions[run.path].bucket
            self.versions[run.path] = replace(event.version, bucket=before)
        return original(self, run, event, at)

    patch.setattr(Performer, "_finished_tentative", diverged)


@mutation(
    "correct results before every input is corrected",
    "wrong",
    "alive",
    "converge",
    scene="short_silence",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.step

    def soon(self: SUnion) -> int | None:
        upto = [self.available(stream) for stream in self.complete_upto]
        available = [bucket for bucket in upto if bucket is not None]
        return min(available) if len(available) == len(upto) else None

    def on_what_is_there(self: Performer, work: Any, version: Any) -> Any:
        held, self.inputs = self.inputs, Best(self.inputs)  # type: ignore[assignment]
        try:
            return original(self, work, version)
        finally:
            self.inputs = held

    patch.setattr(Best, "best", Best.files, raising=False)
    patch.setattr(SUnion, "all_complete_upto", soon)
    patch.setattr(Performer, "step", on_what_is_there)


@mutation(
    "delete the state that a tentative run started from", "available", "alive", scene="undoing"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._release

    def careless(self: Performer, path: Any, line: Line = "stable") -> None:
        held, self._tentative = self._tentative, {}
        read, self._read = self._read, {}
        original(self, path, line)
        self._tentative, self._read = held, read

    patch.setattr(Performer, "_release", careless)


@mutation("never continue without an input", "available", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "due", lambda self, at, after, **how: after)


@mutation("hold buckets for much longer than max_delay", "available", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.__init__

    def patient(self: SUnion, inputs: Any, patience_us: int | None, own_us: int) -> None:
        original(self, inputs, patience_us and 8 * patience_us, 8 * own_us)

    patch.setattr(SUnion, "__init__", patient)


@mutation(
    "never leave a failure", "lost", "corrected", "available", "alive", "bounded", scene="failure"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_caught_up", lambda self, path: [])


@mutation("never correct a result", "lost", "corrected", "bounded", scene="undoing_reader")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_is_corrected", lambda self, path: False)
    patch.setattr(Consistency, "may_redo", lambda self, whole, stable: False)


@mutation(
    "wait forever for a peer that corrects",
    "lost",
    "bounded",
    "available",
    "delay",
    scene="correction_stuck",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promises, "waits_for", lambda self, at: next(iter(self._grants), None))
    original = Promises.asked

    def deaf(self: Promises, question: Any, *at: int, **options: bool) -> Any:
        return "away" if question.done else original(self, question, *at, **options)

    patch.setattr(Promises, "asked", deaf)


@mutation(
    "keep tentative buckets in the log beside their corrections", "alive", scene="undoing_reader"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log_state, "_supersede", lambda stream, upto: None)


@mutation(
    "do not replace a tentative bucket by an empty bucket", "corrected", "wrong", scene="picky"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.take

    def partly(self: Client, delivery: Any) -> Any:
        return (delivered for delivered in original(self, delivery)
                if delivered[1].rows or not delivered[1].replaces)  # fmt: skip

    patch.setattr(Client, "take", partly)


@mutation("deliver a tentative bucket again when the line restarts", "order", scene="suspending")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Client.subscription

    def restarted(self: Client, replicas: Any) -> Any:
        subscription = original(self, replicas)
        subscription.tentative_upto = -(2**62)
        return subscription

    patch.setattr(Client, "subscription", restarted)
    patch.setattr(Subscription, "_taken", _forgets_tentative(Subscription._taken))


def _forgets_tentative(original: Any) -> Any:
    return lambda self, event: original(self, replace(event, tentative_upto=None))


@mutation(
    "drop the tentative line with every correction",
    "held",
    "available",
    "delay",
    scene="late_coarse",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Consistency, stable: int) -> bool:
        return self.position is not None and not self.forgotten and stable > self.base

    patch.setattr(Consistency, "worth_restarting", hasty)


@mutation("let a tentative step that fails stop the node", "alive", scene="failing")
def _(patch: pytest.MonkeyPatch) -> None:
    def strict(self: Performer, err: BaseException) -> None:
        raise err

    patch.setattr(Performer, "_tentative_failed", strict)


@mutation("log tentative buckets as complete", "wrong", "lost", "alive", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    def whole(self: SOutput, run: Any, results: Any) -> None:
        records: list[Any] = []
        for output, upto in run.outputs:
            for bucket, table in results[output]:
                if self.log.info(output).complete_upto < bucket <= upto:
                    id = SegmentId(output, 0, bucket)
                    records.append(Added(self.log.write(table, id, Stability.STABLE)))
            if upto > self.log.info(output).complete_upto:
                records.append(Boundary(output, upto))
        self.log.append(*records)

    patch.setattr(SOutput, "tentative", whole)


@mutation("count tentative buckets as done", "wrong", "lost", "alive", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._tentative_done

    def done(self: progress.Progress, event: Any) -> Any:
        path = self.paths[event.path]
        if event.hi is not None and path.running_upto is None and path.position is not None:
            path.position = max(path.position, event.hi)
        return original(self, event)

    patch.setattr(progress.Progress, "_tentative_done", done)


@mutation("restart the wait with every bucket", "available", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion._arrived

    def restarted(self: SUnion, stream: str, *rest: Any) -> None:
        original(self, stream, *rest)
        held = self._held[stream]
        while len(held) > 1:
            held.popleft()

    patch.setattr(SUnion, "_arrived", restarted)


@mutation("stop a union when one of its inputs is missing", "available", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    def all_of(tree: Any, upto: Any) -> int | None:
        boundaries = list(upto.values())
        return None if None in boundaries else min(boundaries)

    patch.setattr(holdfast.core.consistency, "reach", all_of)


@mutation("continue with only one of the outputs", "available", scene="failure")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Consistency.run

    def one(self: Consistency, lo: int, hi: int) -> Any:
        outputs, *rest = original(self, lo, hi)
        return outputs[:1], *rest

    patch.setattr(Consistency, "run", one)


@mutation("wait longer and longer for tentative results after a full disk", "standing", seed=15199)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._tentative_done

    def pauses(self: progress.Progress, event: Any) -> Any:
        return original(self, replace(event, no_pause=False))

    patch.setattr(progress.Progress, "_tentative_done", pauses)
