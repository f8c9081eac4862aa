"""Mistakes in continuous eventual checkpoints: in what nodes log and release, in the counts of
windows, and in the footprints of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from holdfast.core import progress_events
from holdfast.core.eventual_checkpoint import NOTHING, Committed, EventualCheckpoint
from holdfast.core.progress import Progress
from holdfast.engine.footprints import Footprints, Wanted
from holdfast.engine.inputs import Leaving, OnResults, Results
from holdfast.node.eventual_checkpoints import EventualCheckpoints
from holdfast.node.executor import Performer
from holdfast.storage import DropState, Log, Record, State
from holdfast.verify.sim import simulated_engine, simulated_footprints
from holdfast.verify.sim.simulated_footprints import MarkedKeys
from holdfast.verify.sim.tables import Row
from tests.verify.sim.mutations.planting import Patch, mutation

#: Any of these checkers may report lost, repeated or wrong state.
STATE = ("wrong", "lost", "doubled", "alive", "converge")


def planted(name: str, seed: int, *caught_by: str) -> Callable[[Patch], Patch]:
    return mutation(name, *(caught_by or STATE), seed=seed, only="cec")


# -- the engine ---------------------------------------------------------------------------------


def writing(
    patch: pytest.MonkeyPatch, write_some: Callable[[Mapping[int, Any]], Mapping[int, Any]]
) -> None:
    """Steps leave only some of the entries."""
    original: Any = simulated_footprints.leave

    def leave(*args: Any) -> Any:
        *others, write = args
        return original(*others, None if write is None else lambda held: write(write_some(held)))

    patch.setattr(simulated_engine, "leave", leave)


@planted("mark a key as checked without its footprint", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    def without_one(held: Mapping[int, Any]) -> Mapping[int, Any]:
        first = next((key for key, entry in held.items() if len(entry) == 2), None)
        return {key: entry for key, entry in held.items() if key != first}

    writing(patch, without_one)


@planted("leave no footprint of a window that closes", 4)
def _(patch: pytest.MonkeyPatch) -> None:
    writing(patch, lambda held: {key: entry for key, entry in held.items() if len(entry) == 2})


@planted("replay rows of the last bucket of a footprint", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = MarkedKeys.unseen

    def twice(self: MarkedKeys, rows: Sequence[Row], bucket: int) -> list[Row]:
        return original(self, rows, bucket + 1)

    patch.setattr(MarkedKeys, "unseen", twice)


@planted("ignore rows of the bucket after a footprint", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = MarkedKeys.unseen

    def never(self: MarkedKeys, rows: Sequence[Row], bucket: int) -> list[Row]:
        return original(self, rows, bucket - 1)

    patch.setattr(MarkedKeys, "unseen", never)


@planted("do not count restored windows", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Footprints, "plus", lambda self, windows, loaded_us=0: self)


@planted("count windows that close as open", 12, "bounded", *STATE)
def _(patch: pytest.MonkeyPatch) -> None:
    original = simulated_footprints.leave

    def leave(before: MarkedKeys, after: MarkedKeys, *rest: Any) -> Any:
        left, footprints = original(before, after, *rest)
        gone = {key: mark for key, (_, mark) in before.open.items() if key not in after.open}
        windows = MarkedKeys({key: (None, mark) for key, mark in gone.items()}, {}).windows()
        return left, footprints.plus(windows)

    patch.setattr(simulated_engine, "leave", leave)


# -- the counts ---------------------------------------------------------------------------------


@planted("take the newest footprint for the oldest", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    def newest(self: EventualCheckpoint, step: Committed) -> int:
        counts = {bucket: self._windows.get(bucket, 0) + n for bucket, n in step.windows.items()}
        kept = [bucket for bucket in self._order if counts.get(bucket, 1) > 0]
        return max([*kept, *(bucket for bucket, n in counts.items() if n > 0)], default=step.bucket)

    patch.setattr(EventualCheckpoint, "oldest_after", newest)


@planted("mark windows with the bucket in which they open", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventualCheckpoint, "opened", property(lambda self: self.bucket + 1))


@planted("end a replay and go on in one step", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventualCheckpoint, "last", lambda self, hi: hi)


@mutation("check windows during a replay", *STATE, scene="replays")
def _(patch: pytest.MonkeyPatch) -> None:
    original = EventualCheckpoint.checks

    def eager(self: EventualCheckpoint, at_us: int) -> Any:
        replayed, self.replays_upto = self.replays_upto, -(2**62)
        try:
            return original(self, at_us)
        finally:
            self.replays_upto = replayed

    patch.setattr(EventualCheckpoint, "checks", eager)


@planted("log footprints only if the oldest one changes", 9)
def _(patch: pytest.MonkeyPatch) -> None:
    def moves(self: EventualCheckpoint, step: Committed, footprints: bool) -> bool:
        return not self.replays and self.logged != self.oldest_after(step)

    patch.setattr(EventualCheckpoint, "must_log", moves)


@planted("never check a window", 7, "bounded")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventualCheckpoint, "checks", lambda self, at_us: NOTHING)


# -- the node -----------------------------------------------------------------------------------


def recording(patch: pytest.MonkeyPatch, change: Callable[[Record], Record]) -> None:
    original = EventualCheckpoints._records

    def records(self: EventualCheckpoints, *args: Any) -> Any:
        found, history = original(self, *args)
        return [change(record) for record in found], history

    patch.setattr(EventualCheckpoints, "_records", records)


@planted("drop the records of the oldest footprints", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    def greedy(record: Record) -> Record:
        return replace(record, upto=record.upto + 1) if isinstance(record, DropState) else record

    recording(patch, greedy)


@planted("delete the files of the oldest footprints", 4)
def _(patch: pytest.MonkeyPatch) -> None:
    def greedy(self: EventualCheckpoints, path: str) -> None:
        waiting = self._files.setdefault(path, deque())
        while len(waiting) > 1 and waiting[0][0] <= self.oldest(path):
            self._engine.drop_footprints(waiting.popleft()[1])

    patch.setattr(EventualCheckpoints, "_delete_unneeded", greedy)


@planted("release the inputs of the bucket after the oldest footprint", 4)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Progress.handle

    def greedy(self: Progress, event: Any) -> Any:
        if isinstance(event, progress_events.CheckpointDone) and self.recovery == "cec":
            event = replace(event, needs_from=event.needs_from + 1)
        return original(self, event)

    patch.setattr(Progress, "handle", greedy)


@planted("compare replayed buckets with the log", 1, "alive")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventualCheckpoints, "replayed_upto", lambda self, path: -(2**62))


def changing_run(
    engine: Any, act: Callable[[], Any], logging: Callable[[OnResults], OnResults], **more: Any
) -> Any:
    """`act` with runs of the engine that log their results in another way."""
    run = engine.run
    engine.run = lambda *args, on_results, **rest: run(
        *args, on_results=logging(on_results), **rest, **more
    )
    try:
        return act()
    finally:
        del engine.run


@planted("emit the results of replayed buckets again", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = EventualCheckpoints._step

    def again(self: EventualCheckpoints, path: Any, version: Any, upto: int, on: Any) -> Any:
        def logging(on_results: OnResults) -> OnResults:
            def log(results: Results) -> None:
                on_results(results)
                on(results)

            return log if self.controls[path.name].replays else on_results

        step = partial(original, self, path, version, upto, on)
        return changing_run(self._engine, step, logging)

    patch.setattr(EventualCheckpoints, "_step", again)
    patch.setattr(EventualCheckpoints, "replayed_upto", lambda self, path: -(2**62))


@planted("log footprints before their files are synced", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.sync

    def unsynced(self: Log, files: Sequence[str]) -> None:
        original(self, [file for file in files if "footprints" not in file])

    patch.setattr(Log, "sync", unsynced)


@planted("retain the counts of a failed run", 342)
def _(patch: pytest.MonkeyPatch) -> None:
    original = EventualCheckpoints.run

    def careless(self: EventualCheckpoints, path: Any, *rest: Any) -> Any:
        control = self.controls.get(path.name)
        try:
            return original(self, path, *rest)
        except Exception:
            if control is not None:
                self.controls[path.name] = control
            raise

    patch.setattr(EventualCheckpoints, "run", careless)


@planted("skip the footprints of the bucket that recovery begins with", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    original = EventualCheckpoints.recover

    def blind(self: EventualCheckpoints, path: Any) -> Any:
        version = original(self, path)
        if version is None:
            return None
        found = {
            op: {n: [one for one in held if one[0] > version.bucket] for n, held in shards.items()}
            for op, shards in version.found.items()
        }
        return replace(version, found=found)

    patch.setattr(EventualCheckpoints, "recover", blind)


@planted("retain only the newest footprints at a restart", 1)
def _(patch: pytest.MonkeyPatch) -> None:
    def newest(self: EventualCheckpoints) -> None:
        held = [files for files in self._files.values() if files]
        self._engine.keep_footprints({file for files in held for file in files[-1][1]})

    patch.setattr(EventualCheckpoints, "recovered", newest)


@planted("tentative steps leave footprints", 5)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.step

    def step_with_footprints(self: Performer, work: Any, version: Any) -> Any:
        eventual = self.eventual
        if not isinstance(work, progress_events.RunTentative) or eventual is None:
            return original(self, work, version)
        control = eventual.controls.get(work.path)
        if control is None or control.logged is None:
            return original(self, work, version)
        leaving = Leaving(Wanted(control.oldest, 2**62, 2**62, version.bucket))

        def logging(on_results: OnResults) -> OnResults:
            def log(results: Results) -> None:
                on_results(results)
                left = [one for shards in leaving.left.values() for one in shards.values()]
                self.log.sync([f"state/{file}" for one in left for file in one.files()])
                footprints = {
                    op: {str(number): one.body() for number, one in shards.items() if one.files()}
                    for op, shards in leaving.left.items()
                }
                plan = self.engine.plan_hash(self.paths[work.path])
                oldest = eventual.oldest(work.path)
                body = {"footprints": footprints, "oldest": oldest, "plan": plan,
                        "costs": control.costs.body(), "needs_from": oldest + 1}  # fmt: skip
                self.log.append(State(work.path, work.hi, body))

            return log

        step = partial(original, self, work, version)
        return changing_run(self.engine, step, logging, leaving=leaving)

    patch.setattr(Performer, "step", step_with_footprints)
