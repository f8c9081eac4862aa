"""Continuous eventual checkpoints of a node: steps leave footprints, which are logged together with
their results, and from which a restarted node recovers (`core/eventual_checkpoint.py`).

The footprints of a step are files, which the tasks of the step wrote. The append that makes the
results visible also names these files, and T, the bucket from which recovery would have to replay
the inputs. So the log always has the results and the footprints of the same steps.

Time windows and joins have a *history*: files of panes and rows, and the inputs from a certain
bucket on. The log names the files whenever they have changed. Time windows and joins are restored
as they were after the last step, so a replay leaves them alone.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.core.eventual_checkpoint import Committed, EventualCheckpoint, Settings
from holdfast.core.progress_events import Run
from holdfast.core.recovery_costs import Recovery, RecoveryCosts
from holdfast.engine.footprints import Footprints, Wanted
from holdfast.engine.inputs import Leaving, Results, StepResult
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, LogCorrupted
from holdfast.model.fragments import Path
from holdfast.model.protection import Protection
from holdfast.node.input_index import InputIndex
from holdfast.node.node_events import StepEngine
from holdfast.storage import DropState, Log, Record, State

_log = logging.getLogger("holdfast.node")


class Logged(Protocol):
    """Logs results, together with further records."""

    def __call__(self, results: Results, *more: Record) -> None: ...


@dataclass(frozen=True, slots=True)
class History:
    """The newest history in the log."""

    #: None: the log names no files of a history.
    version: Version | None = None
    #: First bucket of the inputs that recovery needs, also for the replay of keyed state.
    needs_from: int | None = None


class EventualCheckpoints:
    def __init__(
        self,
        node: str,
        log: Log,
        engine: StepEngine,
        inputs: InputIndex,
        clock: Callable[[], int],
        protection: Protection,
        settings: Settings | None = None,
    ) -> None:
        self._node, self._log, self._engine, self._inputs = node, log, engine, inputs
        self._clock = clock
        self._settings = settings or Settings.of(protection)
        self.controls: dict[str, EventualCheckpoint] = {}
        self._history: dict[str, History] = {}
        #: Recoveries that are under way, and how long the last ones took: to load the footprints,
        #: and in all.
        self._recoveries: dict[str, Recovery] = {}
        self.load_us: dict[str, int] = {}
        self.recovery_us: dict[str, int] = {}
        self._status: dict[str, dict[str, int | None]] = {}
        #: Footprints of open windows that were asked for (Gcheck), all entries, and the time to
        #: write and to sync them.
        self.written: Counter[str] = Counter()
        #: The files of footprints that the log names, with their buckets, oldest first.
        self._files: dict[str, deque[tuple[int, list[str]]]] = {}

    def _control(self, bucket: int) -> EventualCheckpoint:
        return EventualCheckpoint(self._settings, bucket)

    def recover(self, path: Path) -> Version | None:
        """The state at T, which the following steps restore from footprints, and the rows after
        it. None if the path has never been committed."""
        began_us, records = self._clock(), self._log.states(path.name)
        if not records:
            return None
        (committed, newest), upto = records[-1], self._complete_upto(path)
        if newest.get("behind"):
            upto = committed
        plan, oldest = newest.get("plan"), newest.get("oldest")
        if plan != self._engine.plan_hash(path) or oldest is None or "needs_from" not in newest:
            raise HoldfastError(
                f"node {self._node!r}: its storage holds the state of another query (path "
                f"{path.name!r}), or of another form of recovery; use another storage (storage=, "
                "--storage)"
            )
        found: dict[str, dict[int, list[tuple[int, Any]]]] = {}
        entries: dict[int, int] = {}
        for bucket, body in records:
            if bucket < oldest:
                continue
            entries[bucket] = 0
            for op, shards in body["footprints"].items():
                for number, left in shards.items():
                    found.setdefault(op, {}).setdefault(int(number), []).append((bucket, left))
                    entries[bucket] += Footprints.of(left).entries
        history = History(self._logged_history(path), newest["needs_from"])
        self._history[path.name] = history
        needed = [record for record in records if record[0] >= oldest]
        self._files[path.name] = deque(self._present(path, needed))
        control = self.controls[path.name] = self._control(oldest)
        control.recover(entries, upto)
        control.costs = RecoveryCosts.of(newest["costs"])
        self._recoveries[path.name] = Recovery(self._clock() - began_us, control.extent)
        self._publish(path.name)
        replays_upto = upto if control.replays else None
        return replace(self.durable(path), found=found, replays_upto=replays_upto)

    def _complete_upto(self, path: Path) -> int:
        return min(self._log.info(output).complete_upto for output in path.outputs)

    def _logged_history(self, path: Path) -> Version | None:
        """The newest history in the log. Raises LogCorrupted if a file of it is missing."""
        histories = self._log.states(_history_of(path))
        if not histories:
            return None
        version = Version.of(path.name, *histories[-1])
        for file in version.files():
            self._check(file, path, version.bucket)
        return version

    def _present(
        self, path: Path, records: Iterable[tuple[int, dict[str, Any]]]
    ) -> Iterator[tuple[int, list[str]]]:
        """The files of each record. Raises LogCorrupted if one is missing; the content is verified
        when it is read."""
        for bucket, body in records:
            files = _files(body["footprints"])
            yield bucket, files
            for file in files:
                self._check(file, path, bucket)

    def _check(self, file: str, path: Path, bucket: int) -> None:
        if not self._log.has_file(os.path.join("state", file)):
            name = os.path.join(self._engine.folder, file)
            raise LogCorrupted(
                f"{name} is missing, a footprint of path {path.name!r} after bucket {bucket}; "
                f"restore the folder {self._log.root} from a backup, or delete it: the node then "
                "starts again from the first bucket, if none of its inputs was deleted"
            )

    def recovered(self) -> None:
        """Delete footprints of steps that were not committed."""
        files = {file for held in self._files.values() for _, files in held for file in files}
        self._engine.keep_footprints(files)

    def replayed_upto(self, path: Path) -> int:
        control = self.controls.get(path.name)
        return -(2**62) if control is None else control.replays_upto

    def run(self, path: Path, version: Version, run: Run, on_results: Logged) -> StepResult:
        """Compute the buckets of a stable step. Buckets whose results are logged are replayed by a
        step of their own."""
        control = self.controls.setdefault(path.name, self._control(version.bucket))
        before, recovery = control, self._recoveries.get(path.name)
        if control.replays:
            before, recovery = copy.deepcopy(control), copy.copy(recovery)
        try:
            while True:
                result = self._step(path, version, run.hi, on_results)
                version = result.version
                if version.bucket == run.hi:
                    return result
        except BaseException:  # the run is repeated from its beginning
            self.controls[path.name] = before
            if recovery is not None:
                self._recoveries[path.name] = recovery
            raise

    def _step(self, path: Path, version: Version, upto: int, on_results: Logged) -> StepResult:
        control, began_us = self.controls[path.name], self._clock()
        lo, hi = version.bucket + 1, control.last(upto)
        checks = control.checks(began_us)
        each = -(-checks.most // self._engine.network.partitions)
        referred = self._rows(path, version.needs_from, hi)
        leaving = Leaving(
            Wanted(control.oldest, checks.upto, each, control.opened, self._settings.literal,
                   control.turn),
            folds=control.folds(sum(referred.values())),
        )  # fmt: skip
        done: list[tuple[Committed, History]] = []

        def with_footprints(results: Results) -> None:
            step = self._committed(path, referred, hi, leaving)
            records, history = self._records(path, step, leaving)
            done[:] = [(replace(step, logged=bool(records)), history)]
            if not control.replays:
                on_results(results, *records)

        result = self._engine.run(
            path, version, lo, hi, self._inputs, on_results=with_footprints, leaving=leaving
        )
        ((step, history),) = done
        self._measure(path.name, step, leaving, began_us)
        if not control.replays:
            control.logged, self._history[path.name] = control.oldest_after(step), history
            entries = sum(step.entries.values())
            self.written.update(checks=step.checks, entries=entries, took_us=step.took_us)
        control.committed(step)
        self._publish(path.name)
        self._delete_unneeded(path.name)
        return result

    def _rows(self, path: Path, lo: int, hi: int) -> dict[int, int]:
        """The input rows of each bucket."""
        rows: Counter[int] = Counter()
        for stream in path.inputs:
            for file in self._inputs.files(stream, lo, hi):
                rows[file.bucket] += file.rows
        return dict(sorted(rows.items()))

    def _committed(
        self, path: Path, referred: Mapping[int, int], hi: int, leaving: Leaving
    ) -> Committed:
        """What a step up to bucket `hi` changes. `referred`: the rows of the inputs that the
        version before refers to, and the new ones."""
        control, left = self.controls[path.name], _each(leaving)
        windows: Counter[int] = Counter()
        for one in left:
            windows.update(one.windows)
        return Committed(
            hi, {bucket: count for bucket, count in referred.items() if bucket > control.bucket},
            {hi: 0 if control.replays else sum(one.entries for one in left)}, windows,
            sum(one.checks for one in left), max((one.took_us for one in left), default=0),
            0 if leaving.history is None else sum(referred.values()),
        )  # fmt: skip

    def _records(
        self, path: Path, step: Committed, leaving: Leaving
    ) -> tuple[list[Record], History]:
        """The records to be appended with the results of a step, and the history that the log has
        then."""
        control, logged = self.controls[path.name], self._history.get(path.name, History())
        footprints = {
            op: {str(number): one.body() for number, one in shards.items() if one.files()}
            for op, shards in leaving.left.items()
        }
        files, history = _files(footprints), leaving.history
        oldest = control.oldest_after(step)
        needs_from = oldest + 1
        if history is not None:
            needs_from = min(needs_from, history.needs_from)
            if logged.version is not None and history.holds_the_same_as(logged.version):
                history = None
        behind = control.is_behind(step.bucket, self._complete_upto(path))
        changed = history is not None or needs_from != logged.needs_from or behind
        if not control.must_log(step, bool(files) or changed):
            return [], logged
        self._files.setdefault(path.name, deque()).append((step.bucket, list(files)))
        body: dict[str, Any] = {
            "footprints": footprints, "oldest": oldest, "plan": self._engine.plan_hash(path),
            "costs": control.costs.body(), "needs_from": needs_from, "behind": behind,
        }  # fmt: skip
        records: list[Record] = [
            State(path.name, step.bucket, body), DropState(path.name, oldest),
        ]  # fmt: skip
        if history is not None:
            name = _history_of(path)
            records += [State(name, step.bucket, history.body()), DropState(name, step.bucket)]
            durable = set() if logged.version is None else set(logged.version.files())
            files += [file for file in history.files() if file not in durable]
        began_us = self._clock()
        self._log.sync([os.path.join("state", file) for file in files])
        self.written["sync_us"] += self._clock() - began_us
        return records, History(history or logged.version, needs_from)

    def _measure(self, path: str, step: Committed, leaving: Leaving, began_us: int) -> None:
        """Take the time of a step, or of a recovery that ends with it."""
        control, took_us = self.controls[path], self._clock() - began_us
        recovery = self._recoveries.get(path)
        if recovery is None:
            control.costs.stepped(sum(step.rows.values()), took_us)
            return
        loads_us = [one.loaded_us for one in _each(leaving)]
        loaded_us = sum(loads_us) if leaving.one_task else max(loads_us, default=0)
        if control.replays:
            recovery.replayed(step.rows, took_us, loaded_us)
            return
        self.recovery_us[path] = recovery.finished(step.rows, took_us, loaded_us, control.costs)
        self.load_us[path] = recovery.load_us
        del self._recoveries[path]
        took_s, stated_us = self.recovery_us[path] / 1e6, self._settings.targets.recovery_us
        if stated_us is not None and took_s > stated_us / 1e6:
            _log.warning(
                "node %s: path %s recovered in %.1f s, stated are %.1f s; footprints can shorten "
                "loading (%.1f s) and replaying (%.1f s), but not the rest",
                self._node, path, took_s, stated_us / 1e6, recovery.load_us / 1e6,
                recovery.replay_us / 1e6,
            )  # fmt: skip

    def status(self, path: str) -> dict[str, int | None] | None:
        """What recovery would have to do after the last step, and how long the last one took. May
        be called while a step runs."""
        return self._status.get(path)

    def _publish(self, path: str) -> None:
        control = self.controls[path]
        stated_us, last_us = self._settings.targets.recovery_us, self.recovery_us.get(path)
        self._status[path] = {
            "open": control.open, "oldest": control.oldest, "entries_to_read": control.extent,
            "rows_to_replay": control.replayed, "checks": self.written["checks"],
            "recovery_ms_predicted": round(control.predicted_us / 1_000),
            "recovery_ms_fixed": round(control.costs.fixed_us / 1_000),
            "recoveries_measured": control.costs.recoveries,
            "recovery_ms_stated": None if stated_us is None else stated_us // 1_000,
            "recovery_ms_last": None if last_us is None else round(last_us / 1_000),
        }  # fmt: skip

    def oldest(self, path: str) -> int:
        """T in the log: earlier inputs are not needed."""
        logged = self.controls[path].logged
        assert logged is not None, "a step was committed, or the path was recovered"
        return logged

    def durable(self, path: Path) -> Version:
        """The version that the log describes: T, the files of the history, and the first bucket of
        the inputs that recovery would need."""
        history, oldest = self._history[path.name], self.oldest(path.name)
        assert history.needs_from is not None, "a step was committed, or the path was recovered"
        version = history.version or self._engine.empty(path, oldest)
        return replace(version, bucket=oldest, needs_from=history.needs_from)

    def _delete_unneeded(self, path: str) -> None:
        waiting, oldest = self._files.setdefault(path, deque()), self.oldest(path)
        while waiting and waiting[0][0] < oldest:
            self._engine.drop_footprints(waiting.popleft()[1])


def _history_of(path: Path) -> str:
    """The name of the records with the history of a path; no name of an output has a plus."""
    return f"{path.name}+history"


def _each(leaving: Leaving) -> list[Footprints]:
    return [one for shards in leaving.left.values() for one in shards.values()]


def _files(footprints: Mapping[str, Mapping[Any, Any]]) -> list[str]:
    return [
        file
        for shards in footprints.values()
        for left in shards.values()
        for file in Footprints.of(left).files()
    ]
