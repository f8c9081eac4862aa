"""A node compares its results with those of its peers, and recomputes buckets that differ
(`core.divergence` decides what follows)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from holdfast.core.divergence import (
    Action,
    Compared,
    CompareInputs,
    Divergence,
    InputCompared,
    Recompute,
    Recomputed,
    Refute,
    Report,
    Window,
    extended,
)
from holdfast.engine.state import Version
from holdfast.errors import LogError, Refuted, Trimmed
from holdfast.model.fragments import Fragment
from holdfast.node.input_index import InputIndex
from holdfast.node.node_events import (
    Carrier,
    DigestsReceived,
    InputDigestsReceived,
    Recomputation,
    StepEngine,
)
from holdfast.node.pieces import run_in_pieces
from holdfast.storage import Counter, Log
from holdfast.streams.calls import Digests
from holdfast.streams.delivery import Delivery
from holdfast.types import Stability

_log = logging.getLogger("holdfast.node")
#: Counter in the log of a node whose results were refuted.
REFUTED = "refuted"


class Comparison:
    """Compares digests. The thread of the node's loop calls all methods; other threads may call
    `digests`, `note` and `note_input`."""

    def __init__(
        self,
        name: str,
        fragment: Fragment,
        log: Log,
        carrier: Carrier,
        replicas: int,
    ) -> None:
        self._name, self._log, self._carrier = name, log, carrier
        if log.counter(REFUTED):
            raise Refuted(f"node {name!r}: recomputation has refuted the results in its storage")
        self._path_of = {out: path.name for path in fragment.paths for out in path.outputs}
        self._core = Divergence(name, replicas)
        #: Versions that recomputations start from: their files and inputs must be retained.
        self._from: dict[str, Version] = {}
        #: Digests of the last buckets of each output, and of each input as received.
        self._made: dict[str, Window] = {}
        self._taken: dict[str, Window] = {}
        self.note(fragment.outputs)

    @property
    def differences(self) -> list[str]:
        """Differences from the results of other replicas, as text for the status."""
        return [difference.text for difference in list(self._core.differences.values())]

    def versions(self, path: str) -> list[Version]:
        return [self._from[path]] if path in self._from else []

    def digests(self) -> Digests:
        """The digests and findings that peers receive."""
        return Digests(dict(self._made), self._core.found())

    def compare(self, event: DigestsReceived, at: int, durable: Mapping[str, Version]) -> None:
        for stream, theirs in event.digests.windows.items():
            if (own := self._made.get(stream)) is not None:
                finding = event.digests.found.get(stream)
                compared = Compared(at, event.peer, stream, own, theirs, finding)
                self._perform(self._core.handle(compared), at, durable)

    def compare_with_inputs(
        self, event: InputDigestsReceived, at: int, durable: Mapping[str, Version]
    ) -> None:
        for stream, windows in event.made.items():
            if (taken := self._taken.get(stream)) is not None:
                compared = InputCompared(at, event.stream, stream, taken, windows)
                self._perform(self._core.handle(compared), at, durable)

    def finished(
        self,
        run: Recomputation,
        digest: str | None,
        error: BaseException | None,
        at: int,
        durable: Mapping[str, Version],
    ) -> None:
        self._from.pop(run.path, None)
        why = "" if error is None else str(error)
        recomputed = Recomputed(at, run.stream, run.hi, None if error else digest, why)
        self._perform(self._core.handle(recomputed), at, durable)

    def _perform(self, actions: list[Action], at: int, durable: Mapping[str, Version]) -> None:
        for action in actions:
            match action:
                case Report():
                    level = logging.INFO if action.resolved else logging.ERROR
                    _log.log(level, "node %s: %s", self._name, action.text)
                case Recompute():
                    self._recompute(action, at, durable)
                case CompareInputs():
                    self._carrier.compare_inputs(self._path_of[action.stream], action.stream)
                case Refute():
                    # A restart for another reason must not continue with these results.
                    with suppress(LogError):
                        self._log.append(Counter(REFUTED, 1))
                    raise Refuted(
                        f"node {self._name!r}: {action.why}. The node is rebuilt, and its old "
                        "storage is moved aside; check the memory and the disk of its host"
                    )

    def _recompute(self, action: Recompute, at: int, durable: Mapping[str, Version]) -> None:
        """Recompute a bucket from the last checkpoint: its inputs since then are retained, here
        and upstream."""
        path = self._path_of[action.stream]
        version = durable.get(path)
        if path in self._from:
            why = "another bucket of the path is being recomputed"
        elif version is None:
            why = "there is no checkpoint to recompute the bucket from"
        elif version.bucket >= action.bucket:
            why = f"the newest checkpoint, of bucket {version.bucket}, already includes the bucket"
        else:
            self._from[path] = version
            work = Recomputation(path, version.bucket + 1, action.bucket, action.stream)
            self._carrier.run(work, version)
            return
        unknown = Recomputed(at, action.stream, action.bucket, None, why)
        self._perform(self._core.handle(unknown), at, durable)

    def note_input(self, delivery: Delivery) -> None:
        window = self._taken.get(delivery.stream)
        if window is not None and delivery.upto <= window.upto:
            return
        digests = [
            (segment.id.bucket, segment.checksum)
            for segment in delivery.segments
            if segment.stability is Stability.STABLE
        ]
        self._taken[delivery.stream] = extended(window, delivery.since, delivery.upto, digests)

    def note(self, streams: Iterable[str]) -> None:
        """Record the digests of new buckets after a step. The log may trim these buckets long
        before a peer asks for their digests."""
        for stream in streams:
            if not self._log.has(stream):
                continue
            info, window = self._log.info(stream), self._made.get(stream)
            since = info.trimmed_upto + 1 if window is None else window.upto + 1
            try:
                segments = self._log.segments(stream, since, info.complete_upto)
            except Trimmed:  # a consumer has just released them: unseen buckets are not compared
                since, window = self._log.info(stream).trimmed_upto + 1, None
                segments = []
                info = replace(info, complete_upto=since - 1)
            digests = ((segment.id.bucket, segment.checksum) for segment in segments)
            self._made[stream] = extended(window, since, info.complete_upto, digests)


def digest_of(
    work: Recomputation, engine: StepEngine, path: Any, version: Version, inputs: InputIndex
) -> tuple[str, Version]:
    """Compute the bucket and return its digest; no result is logged."""
    result = run_in_pieces(engine, path, version, work.lo, work.hi, inputs, "recomputation")
    tables = [table for bucket, table in result.outputs[work.stream] if bucket == work.hi]
    return "+".join(engine.digest(table) for table in tables), result.version
