"""SOutput (Borealis section 3.4.2): what a node's results become in its log.

Two lines of a path, the stable and the tentative one, write to the same streams. What is stable is
written once and never touched again. A tentative bucket stands until the stable one takes its
place, with a higher version, in the append that makes that one visible. Data first, then the
append.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core import progress_events
from holdfast.errors import LogError, NotDeterministic
from holdfast.model.fragments import Path
from holdfast.storage import Added, Boundary, Log, Tentative
from holdfast.types import Segment, SegmentId, Stability

#: For each output stream the tables of the buckets that have rows.
Results = Mapping[str, list[tuple[int, Any]]]


class SOutput:
    def __init__(self, log: Log, digest: Callable[[Any], str]) -> None:
        self.log, self._digest = log, digest
        #: Per path: results of earlier buckets are not to be given to anybody.
        self.valid_from: dict[str, int] = {}
        #: Number of the tentative line of each path that has one.
        self.lines: dict[str, int] = {}
        self._lock = threading.Lock()

    def stable(self, run: progress_events.Run, path: Path, results: Results) -> None:
        """Results and boundaries of all outputs. What had been logged before is compared instead:
        the same bits, or somebody's code is not deterministic."""
        valid_from = self.valid_from[run.path]
        if run.rebuild_from is not None:
            valid_from = max(valid_from, run.rebuild_from)
        written: dict[str, list[Segment]] = {output: [] for output in path.outputs}
        records: list[Any] = []
        doomed: list[Segment] = []
        try:
            # A whole failure may be written here, while the tentative line goes on beside it.
            for output in path.outputs:
                info = self.log.info(output)
                guessed = info.tentative_upto is not None or run.path in self.lines
                version = info.undos + guessed  # one may be made meanwhile
                for bucket, table in results[output]:
                    if bucket < valid_from:
                        continue
                    if bucket <= info.complete_upto:
                        self._compare(output, bucket, table)
                        continue
                    id = SegmentId(output, 0, bucket, version=version)
                    written[output].append(self.log.write(table, id, Stability.STABLE))
            with self._lock:
                for output in path.outputs:
                    info = self.log.info(output)
                    doomed += self.log.tentative(output, upto=run.hi)[0]
                    records += [Added(segment) for segment in written[output]]
                    if run.hi > info.complete_upto:
                        records.append(Boundary(output, run.hi))
                self.log.append(*records)
        except LogError:
            self.log.discard([segment for output in path.outputs for segment in written[output]])
            raise
        self.log.discard(doomed)

    def tentative(self, run: progress_events.RunTentative, results: Results) -> None:
        """What the stable line has overtaken, or another line replaced, is not given any more."""
        records: list[Any] = []
        written: list[Segment] = []
        with self._lock:
            if self.lines.get(run.path) != run.line:
                return
            try:
                for output, upto in run.outputs:
                    info = self.log.info(output)
                    given = info.tentative_upto
                    since = max(run.lo, (info.complete_upto if given is None else given) + 1)
                    for bucket, table in results[output]:
                        if max(since, self.valid_from[run.path]) <= bucket <= upto:
                            id = SegmentId(output, 0, bucket, version=info.undos)
                            written.append(self.log.write(table, id, Stability.TENTATIVE))
                            records.append(Added(written[-1]))
                    if since <= upto:
                        records.append(Tentative(output, since, upto, run.missing, *run.partial))
                self.log.append(*records)
            except LogError:
                self.log.discard(written)
                raise

    def leave(self, path: Path) -> None:
        """The tentative line is over: nothing more of it is given."""
        with self._lock:
            self.lines.pop(path.name, None)

    def _compare(self, output: str, bucket: int, table: Any) -> None:
        if bucket <= self.log.info(output).trimmed_upto:
            return
        logged = self.log.segments(output, bucket, bucket)
        if [segment.checksum for segment in logged] != [self._digest(table)]:
            raise NotDeterministic(
                f"output {output!r}, bucket {bucket}: computed again after a restart it differs "
                "from what was logged; some function in the network is not deterministic"
            )
