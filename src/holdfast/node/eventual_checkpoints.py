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
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.core.eventual_checkpoint import Committed, EventualCheckpoint
from holdfast.core.progress_events import Run
from holdfast.engine.footprints import Footprints, Wanted
from holdfast.engine.inputs import Leaving, Results, StepResult
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, LogCorrupted
from holdfast.model.fragments import Path
from holdfast.model.protection import Protection
from holdfast.node.input_index import InputIndex
from holdfast.node.node_events import StepEngine
from holdfast.storage import DropState, Log, Record, State


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
    ) -> None:
        self._node, self._log, self._engine, self._inputs = node, log, engine, inputs
        self._clock = clock
        self._limits = (protection.recovery_entries, protection.recovery_rows)
        self.controls: dict[str, EventualCheckpoint] = {}
        #: The state after a step, until the step is committed.
        self._next: dict[str, tuple[EventualCheckpoint, History]] = {}
        self._history: dict[str, History] = {}
        #: The files of footprints that the log names, with their buckets, oldest first.
        self._files: dict[str, deque[tuple[int, list[str]]]] = {}

    def recover(self, path: Path) -> Version | None:
        """The state at T, which the following steps restore from footprints, and the rows after
        it. None if the path has never been committed."""
        records = self._log.states(path.name)
        if not records:
            return None
        upto = min(self._log.info(output).complete_upto for output in path.outputs)
        newest = records[-1][1]
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
            for op, shards in body["footprints"].items():
                for number, left in shards.items():
                    found.setdefault(op, {}).setdefault(int(number), []).append((bucket, left))
                    entries[bucket] = entries.get(bucket, 0) + Footprints.of(left).entries
        history = History(self._logged_history(path, records), newest["needs_from"])
        self._history[path.name] = history
        needed = [record for record in records if record[0] >= oldest]
        self._files[path.name] = deque(self._present(path, needed))
        control = self.controls[path.name] = EventualCheckpoint.began(oldest, *self._limits)
        control.recover(entries, upto)
        replays_upto = upto if control.replays else None
        return replace(self.durable(path), found=found, replays_upto=replays_upto)

    def _logged_history(
        self, path: Path, records: Iterable[tuple[int, dict[str, Any]]]
    ) -> Version | None:
        """The newest history in the log. Raises LogCorrupted if a file of it is missing."""
        histories = [(bucket, body["history"]) for bucket, body in records if "history" in body]
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
        name = os.path.join(self._engine.folder, file)
        if not os.path.exists(name):
            raise LogCorrupted(
                f"{name} is missing, a footprint of path {path.name!r} after bucket {bucket}"
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
        new = EventualCheckpoint.began(version.bucket, *self._limits)
        before = self.controls.setdefault(path.name, new)
        try:
            while True:
                result = self._step(path, version, run.hi, on_results)
                self._committed(path)
                version = result.version
                if version.bucket == run.hi:
                    return result
        except BaseException:  # the run is repeated from its beginning
            self.controls[path.name] = before
            raise

    def _step(self, path: Path, version: Version, upto: int, on_results: Logged) -> StepResult:
        control = self.controls[path.name]
        lo, hi = version.bucket + 1, control.last(upto)
        checks = control.checks(self._clock())
        each = -(-checks.most // self._engine.network.partitions)
        referred = self._rows(path, version.needs_from, hi)
        leaving = Leaving(
            Wanted(control.oldest, checks.upto, each, control.opened),
            folds=control.folds(sum(referred.values())),
        )

        def with_footprints(results: Results) -> None:
            records = self._records(path, referred, hi, leaving)
            if not control.replays:
                on_results(results, *records)

        return self._engine.run(
            path, version, lo, hi, self._inputs, on_results=with_footprints, leaving=leaving
        )

    def status(self, path: str) -> dict[str, int] | None:
        """What recovery would have to do now."""
        control = self.controls.get(path)
        if control is None:
            return None
        return {
            "open": control.open, "oldest": control.oldest, "entries_to_read": control.extent,
            "rows_to_replay": control.replayed,
        }  # fmt: skip

    def _rows(self, path: Path, lo: int, hi: int) -> Counter[int]:
        """The input rows of each bucket."""
        rows: Counter[int] = Counter()
        for stream in path.inputs:
            for file in self._inputs.files(stream, lo, hi):
                rows[file.bucket] += file.rows
        return rows

    def _records(
        self, path: Path, referred: Mapping[int, int], hi: int, leaving: Leaving
    ) -> list[Record]:
        """The records to be appended with the results of a step up to bucket `hi`. `referred`: the
        rows of the inputs that the version before refers to, and the new ones."""
        control = copy.deepcopy(self.controls[path.name])
        replays, history = control.replays, leaving.history
        left = [one for shards in leaving.left.values() for one in shards.values()]
        windows: Counter[int] = Counter()
        for one in left:
            windows.update(one.windows)
        new = {bucket: count for bucket, count in referred.items() if bucket > control.bucket}
        control.committed(
            Committed(
                hi, new,
                {} if replays else {hi: sum(one.entries for one in left)}, windows,
                sum(one.checks for one in left), sum(one.took_us for one in left),
                0 if history is None else sum(referred.values()),
            )
        )  # fmt: skip
        logged = self._history.get(path.name, History())
        self._next[path.name] = control, logged
        footprints = {
            op: {str(number): one.body() for number, one in shards.items() if one.files()}
            for op, shards in leaving.left.items()
        }
        files = _files(footprints)
        needs_from = control.oldest + 1
        if history is not None:
            needs_from = min(needs_from, history.needs_from)
            if logged.version is not None and history.holds_the_same_as(logged.version):
                history = None
        changed = history is not None or needs_from != logged.needs_from
        if replays or not control.must_log(bool(files) or changed):
            return []
        control.logged = control.oldest
        self._files.setdefault(path.name, deque()).append((hi, list(files)))
        plan = self._engine.plan_hash(path)
        body: dict[str, Any] = {"footprints": footprints, "oldest": control.oldest, "plan": plan}
        body["needs_from"] = needs_from
        if history is not None:
            body["history"] = history.body()
            durable = set() if logged.version is None else set(logged.version.files())
            files += [file for file in history.files() if file not in durable]
        self._log.sync([os.path.join("state", file) for file in files])
        newest = history or logged.version
        self._next[path.name] = control, History(newest, needs_from)
        # The record with the newest history remains, however old it is.
        upto = control.oldest if newest is None else min(control.oldest, newest.bucket)
        return [State(path.name, hi, body), DropState(path.name, upto)]

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

    def _committed(self, path: Path) -> None:
        """The step was committed. Deletes footprints that are no longer needed."""
        self.controls[path.name], self._history[path.name] = self._next.pop(path.name)
        waiting, oldest = self._files.setdefault(path.name, deque()), self.oldest(path.name)
        while waiting and waiting[0][0] < oldest:
            self._engine.drop_footprints(waiting.popleft()[1])


def _files(footprints: Mapping[str, Mapping[Any, Any]]) -> list[str]:
    return [
        file
        for shards in footprints.values()
        for left in shards.values()
        for file in Footprints.of(left).files()
    ]
