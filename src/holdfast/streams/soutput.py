"""SOutput (Borealis section 3.4.2): writes the results of a node to its log.

The stable line and the tentative line of a path write to the same streams. A stable bucket is
written once and never changed. A tentative bucket remains valid until the stable bucket replaces
it: the stable segment has a higher version, and the append that makes it visible also removes the
tentative one. Data files are written before the append.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.core import progress_events
from holdfast.errors import LogError, NotDeterministic
from holdfast.model.fragments import Path
from holdfast.storage import Added, Boundary, Log, Tentative
from holdfast.types import Segment, SegmentId, Stability

#: By output stream: number and table of each bucket that has rows.
Results = Mapping[str, list[tuple[int, Any]]]


class SOutput:
    def __init__(self, log: Log, digest: Callable[[Any], str]) -> None:
        self.log, self._digest = log, digest
        #: By path: first bucket whose results may be published.
        self.valid_from: dict[str, int] = {}
        #: Number of the tentative line of each path that has one.
        self.lines: dict[str, int] = {}
        self._lock = threading.Lock()

    def computed_upto(self, outputs: Iterable[str]) -> int | None:
        """Last bucket that the log has of any of the outputs; None: none, or all are deleted."""
        infos = [self.log.info(output) for output in outputs if self.log.has(output)]
        computed = [info.complete_upto for info in infos if info.complete_upto > info.trimmed_upto]
        return max(computed, default=None)

    def stable(self, run: progress_events.Run, path: Path, results: Results) -> None:
        """Write results and boundaries of all outputs in one append. Buckets
        that were already logged are compared instead; a difference raises `NotDeterministic`."""
        valid_from = self.valid_from[run.path]
        if run.rebuild_from is not None:
            valid_from = max(valid_from, run.rebuild_from)
        written: dict[str, list[Segment]] = {output: [] for output in path.outputs}
        records: list[Any] = []
        replaced: list[Segment] = []
        try:
            # Without the lock: a correction may write many buckets, and the tentative line must
            # continue meanwhile.
            for output in path.outputs:
                info = self.log.info(output)
                has_tentative = info.tentative_upto is not None or run.path in self.lines
                version = (
                    info.undos + has_tentative
                )  # above any tentative segment written meanwhile
                self._compare(output, results[output], max(run.lo, valid_from), run.hi)
                for bucket, table in results[output]:
                    if bucket < valid_from or bucket <= info.complete_upto:
                        continue
                    id = SegmentId(output, 0, bucket, version=version)
                    written[output].append(self.log.write(table, id, Stability.STABLE))
            with self._lock:
                for output in path.outputs:
                    info = self.log.info(output)
                    replaced += self.log.tentative(output, upto=run.hi)[0]
                    records += [Added(segment) for segment in written[output]]
                    if run.hi > info.complete_upto and not info.ended:
                        records.append(Boundary(output, run.hi))
                self.log.append(*records)
        except LogError:
            self.log.discard([segment for output in path.outputs for segment in written[output]])
            raise
        self.log.discard(replaced)

    def tentative(self, run: progress_events.RunTentative, results: Results) -> None:
        """Write tentative results. Buckets that the stable line has overtaken are skipped, and so
        are all results of a tentative line that has ended."""
        records: list[Any] = []
        written: list[Segment] = []
        with self._lock:
            if self.lines.get(run.path) != run.line:
                return
            try:
                for output, upto in run.outputs:
                    info = self.log.info(output)
                    tentative_upto = info.tentative_upto
                    since = max(
                        run.lo,
                        (info.complete_upto if tentative_upto is None else tentative_upto) + 1,
                    )
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
        """End the tentative line of a path: its later results are dropped."""
        with self._lock:
            self.lines.pop(path.name, None)

    def _compare(self, output: str, results: list[tuple[int, Any]], lo: int, hi: int) -> None:
        """Compare recomputed buckets with the log, including buckets without rows."""
        info = self.log.info(output)
        lo = max(lo, info.trimmed_upto + 1)
        hi = hi if info.ended else min(hi, info.complete_upto)  # nothing follows the end
        if lo > hi:
            return
        segments = self.log.segments(output, lo, hi)
        logged = {segment.id.bucket: segment.checksum for segment in segments}
        tables = {bucket: table for bucket, table in results if lo <= bucket <= hi}
        for bucket in sorted(logged | tables):
            recomputed = self._digest(tables[bucket]) if bucket in tables else None
            if recomputed != logged.get(bucket):
                raise NotDeterministic(
                    f"output {output!r}, bucket {bucket}: the result recomputed after a restart "
                    "differs from the logged result; find the function in the network that is not "
                    "deterministic. If the log of a source was replaced by an older copy, restore "
                    "its newest copy instead"
                )
