"""Mistakes in continuous eventual checkpoints: in the layers of keyed state, in the records that
name them, in what a node deletes and releases, and in the replay after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core import durability
from holdfast.core import progress_events as core
from holdfast.core.eventual_checkpoint import EventualCheckpoint
from holdfast.core.path_state import PathState
from holdfast.core.progress import Progress
from holdfast.engine.state import Layer, Shard, Version
from holdfast.errors import StorageFull
from holdfast.node.checkpoints import Checkpoints
from holdfast.node.executor import Performer
from holdfast.node.node_events import Flushed
from holdfast.storage import DropState, Log, State
from holdfast.streams.soutput import SOutput
from holdfast.verify.sim import simulated_engine
from holdfast.verify.sim.simulated_engine import REMOVED, EngineTwin, changed_keys
from tests.verify.sim.mutations.planting import Patch, mutation

#: Any of these checkers may report lost, repeated or wrong state.
STATE = ("wrong", "lost", "doubled", "alive", "converge")

Entries = dict[int, Any]


def planted(name: str, seed: int, *caught_by: str) -> Callable[[Patch], Patch]:
    return mutation(name, *(caught_by or STATE), seed=seed, only="cec")


# -- layers of keyed state ----------------------------------------------------------------------
#
# The tasks of Spark write layers in production; the simulated engine writes them here.


def uncounted(patch: pytest.MonkeyPatch) -> None:
    """The simulated engine compares the number of keys in the layers with the count in the shard;
    production only reports this count. Without the comparison, results must show the mistake."""

    def loaded(self: Any, op: str) -> Entries:
        state: Entries = {}
        for layer in self._before.shards.get(op, {}).get(0, Shard()).layers:
            state |= self.engine.load(layer.file)
        return {key: held for key, held in state.items() if held is not REMOVED}

    patch.setattr(simulated_engine._Step, "_loaded", loaded)


def leaving_out(
    patch: pytest.MonkeyPatch, is_left_out: Callable[[Entries, int, Any], bool]
) -> None:
    """Layers lack the first entry for which `is_left_out(before, key, entry)` holds."""

    def incomplete(before: Entries, after: Entries) -> Entries:
        entries = changed_keys(before, after)
        found = [key for key, entry in sorted(entries.items()) if is_left_out(before, key, entry)]
        return {key: entry for key, entry in entries.items() if key not in found[:1]}

    patch.setattr(simulated_engine, "changed_keys", incomplete)
    uncounted(patch)


@planted("leave a key that opens out of a layer", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    leaving_out(patch, lambda before, key, entry: key not in before)


@planted("leave a key that changes out of a layer", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    leaving_out(patch, lambda before, key, entry: key in before and entry is not REMOVED)


@planted("write no entry of a key that closes", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    leaving_out(patch, lambda before, key, entry: entry is REMOVED)


# Only the simulated engine verifies this count: in production it is a number for the status.
@planted("count one open key too many", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    original = simulated_engine._Step._shard

    def miscounted(self: Any, op: str, state: Entries) -> Shard:
        shard = original(self, op, state)
        return replace(shard, rows=shard.rows + 1)

    patch.setattr(simulated_engine._Step, "_shard", miscounted)


@planted("merge layers without the changes of the step", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    original = simulated_engine._Step._shard

    def stale(self: Any, op: str, state: Entries) -> Shard:
        layers = self._before.shards.get(op, {}).get(0, Shard()).layers
        return original(self, op, self._loaded(op) if layers and self._upkeep.merges else state)

    patch.setattr(simulated_engine._Step, "_shard", stale)


# -- records ------------------------------------------------------------------------------------


def recording(patch: pytest.MonkeyPatch, change: Callable[[Version], Version]) -> None:
    """Records describe another version than the one that is made durable."""
    original = Checkpoints.write

    def write(self: Checkpoints, version: Version, costs: tuple[float, ...] = ()) -> int:
        return original(self, change(version), costs)

    patch.setattr(Checkpoints, "write", write)


def relayering(
    patch: pytest.MonkeyPatch, change: Callable[[tuple[Layer, ...]], tuple[Layer, ...]]
) -> None:
    """Records name other layers."""

    def relayered(version: Version) -> Version:
        shards = {
            op: {n: replace(shard, layers=change(shard.layers)) for n, shard in held.items()}
            for op, held in version.shards.items()
        }
        return replace(version, shards=shards)

    recording(patch, relayered)
    uncounted(patch)


@planted("name the bucket after a state in its record", 194)
def _(patch: pytest.MonkeyPatch) -> None:
    recording(patch, lambda version: replace(version, bucket=version.bucket + 1))


@planted("name the bucket before a state in its record", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    recording(patch, lambda version: replace(version, bucket=version.bucket - 1))


@planted("leave the newest layer out of a record", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    relayering(patch, lambda layers: layers[:-1] or layers)


@planted("leave the oldest layer out of a record", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    relayering(patch, lambda layers: layers[1:] or layers)


@planted("name the layers of a record in the wrong order", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    relayering(patch, lambda layers: layers[::-1])


@mutation(
    "replace a record before the files of the next one are synced", *STATE, scene="flushes_torn"
)
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Log, path: str, bucket: int, body: dict[str, Any], files: list[str]) -> None:
        self.append(State(path, bucket, json.loads(json.dumps(body))), DropState(path, bucket))
        self.sync(files)

    patch.setattr(Log, "save_state", hasty)


@planted("sync only the newest file of a record", 239)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.sync

    def partly(self: Log, files: Sequence[str]) -> None:
        original(self, files[-1:])

    patch.setattr(Log, "sync", partly)


@planted("sync files but not the folder that names them", 239)
def _(patch: pytest.MonkeyPatch) -> None:
    def nameless(self: Log, files: Sequence[str]) -> None:
        for name in files:
            self._disk.sync_tree(f"{self._base}/{name}", f"{self._base}/{name}")

    patch.setattr(Log, "sync", nameless)


@planted("drop the record that recovery needs", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.drop_states

    def greedy(self: Log, path: str, upto: int) -> None:
        original(self, path, upto + 1)

    patch.setattr(Log, "drop_states", greedy)


@mutation("write two checkpoints of a path at a time", *STATE, scene="flushes_overtake")
def _(patch: pytest.MonkeyPatch) -> None:
    original = durability._requested

    def overlapping(path: PathState, at: int) -> list[core.Action]:
        path.flushing = False
        return original(path, at)

    def flushed(self: Performer, event: Flushed, at: int) -> list[core.Action]:
        self.checkpoints.flushing.setdefault(event.version.path, event.version)
        return finish(self, event, at)

    finish = Performer._flushed
    patch.setattr(durability, "_requested", overlapping)
    patch.setattr(Performer, "_flushed", flushed)


# -- files --------------------------------------------------------------------------------------


def releasing(patch: pytest.MonkeyPatch, change: Callable[[Checkpoints], None]) -> None:
    """Files are released as if the checkpoints were others."""
    original = Performer._release

    def release(self: Performer, *args: Any) -> None:
        checkpoints = self.checkpoints
        held = checkpoints.newest, checkpoints.flushing
        change(checkpoints)
        try:
            original(self, *args)
        finally:
            checkpoints.newest, checkpoints.flushing = held

    patch.setattr(Performer, "_release", release)


@planted("delete the files of a version that is being made durable", 30)
def _(patch: pytest.MonkeyPatch) -> None:
    releasing(patch, lambda checkpoints: setattr(checkpoints, "flushing", {}))


@mutation(
    "delete the files of a record before the next one is durable", *STATE, scene="flushes_overtake"
)
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(checkpoints: Checkpoints) -> None:
        checkpoints.newest = {**checkpoints.newest, **checkpoints.flushing}

    releasing(patch, hasty)


@planted("delete the files of a running step after a checkpoint", 239)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._flushed

    def careless(self: Performer, event: Flushed, at: int) -> list[core.Action]:
        actions = original(self, event, at)
        self._release(self.paths[event.version.path])
        return actions

    patch.setattr(Performer, "_flushed", careless)


@planted("retain no files at a restart", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    original = EngineTwin.recovered
    patch.setattr(EngineTwin, "recovered", lambda self, versions: original(self, []))


# -- checkpoints --------------------------------------------------------------------------------


@planted("make a tentative version durable", 164)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._perform

    def tentative(self: Performer, action: core.Action) -> None:
        versions = self.versions
        if isinstance(action, core.Checkpoint):
            self.versions = {**versions, **self._tentative}
        try:
            original(self, action)
        finally:
            self.versions = versions

    patch.setattr(Performer, "_perform", tentative)


@mutation("take a checkpoint for durable although the disk was full", *STATE, scene="flushes_full")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._flushed

    def careless(self: Performer, event: Flushed, at: int) -> list[core.Action]:
        is_full = isinstance(event.error, StorageFull)
        return original(self, replace(event, error=None) if is_full else event, at)

    patch.setattr(Performer, "_flushed", careless)


@mutation("write no checkpoint after one that failed", "bounded", scene="flushes_full")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(durability, "failed", lambda path, at: [])


@planted("no record is due because of rows", 164, "bounded")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventualCheckpoint, "is_due", lambda self, at_us, needs_from: False)


# -- inputs -------------------------------------------------------------------------------------


def noting(
    patch: pytest.MonkeyPatch, change: Callable[[core.CheckpointDone], core.CheckpointDone]
) -> None:
    original = Progress.handle

    def handle(self: Progress, event: core.Event) -> list[core.Action]:
        return original(self, change(event) if isinstance(event, core.CheckpointDone) else event)

    patch.setattr(Progress, "handle", handle)


@planted("release the inputs of the bucket after a record", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    noting(patch, lambda event: replace(event, needs_from=event.needs_from + 1))


@planted("release the rows that the windows of a record refer to", 277)
def _(patch: pytest.MonkeyPatch) -> None:
    noting(patch, lambda event: replace(event, needs_from=event.bucket + 1))


@planted("release inputs when a checkpoint begins", 239)
def _(patch: pytest.MonkeyPatch) -> None:
    original = durability._requested

    def early(path: PathState, at: int) -> list[core.Action]:
        actions = original(path, at)
        if actions:
            assert path.position is not None
            path.durable = (path.position, path.needs_from)
        return actions

    patch.setattr(durability, "_requested", early)


@planted("delete one bucket more than consumers have released", 185)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Log.trim

    def greedy(self: Log, stream: str, upto: int) -> None:
        original(self, stream, upto + 1)

    patch.setattr(Log, "trim", greedy)


# -- replay -------------------------------------------------------------------------------------


def replays(performer: Performer, path: str, upto: int) -> bool:
    control = performer.checkpoints.eventual.get(path)
    return control is not None and control.recovery is not None and upto <= control.recovery.upto


@planted("emit the results of replayed buckets again", 194)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SOutput.stable

    def again(self: SOutput, run: core.Run, path: Any, results: Any) -> None:
        info = self.log.info

        def earlier(stream: str) -> Any:
            known = info(stream)
            return replace(known, complete_upto=min(known.complete_upto, run.lo - 1))

        self.log.info = earlier  # type: ignore[method-assign]
        try:
            original(self, run, path, results)
        finally:
            del self.log.info

    patch.setattr(SOutput, "stable", again)


@planted("skip the rows of a replayed bucket", 194)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer.step

    def blind(self: Performer, work: Any, version: Version) -> Version:
        if not isinstance(work, core.Run) or not replays(self, work.path, work.hi):
            return original(self, work, version)
        files = self.inputs.files

        def later(stream: str, lo: int, hi: int) -> Any:
            return files(stream, max(lo, work.lo + 1), hi)

        self.inputs.files = later  # type: ignore[method-assign]
        try:
            return original(self, work, version)
        finally:
            del self.inputs.files

    patch.setattr(Performer, "step", blind)
