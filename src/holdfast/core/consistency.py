"""Consistency of one path: its behavior while inputs are missing, and during the correction
(Borealis sections 3.3 and 3.4). Pure.

A path has a *stable line*, the buckets that were run on complete inputs. During a failure a path
may also have a *tentative line*: buckets that were run on the available inputs, starting from the
stable state. A path first blocks. The tentative line starts only when a bucket has been held for
`max_delay` (X in Borealis); from then on the path is in UP_FAILURE. The stable line continues with
every bucket that becomes complete. When every bucket that was given tentatively is complete, the
stable line redoes the remaining ones (STABILIZATION). A tentative result remains valid until the
stable result of the same bucket replaces it. When the stable line has overtaken the tentative line,
the tentative line is dropped.

The work is proportional to the number of corrected buckets: each line runs a bucket once. The
tentative line restarts from the stable state only if at least as many buckets were corrected as the
line has to repeat. The restart lets later tentative results use the corrections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.core.correction_leases import Promises
from holdfast.core.policy import Policy
from holdfast.core.sunion import Partial, SUnion
from holdfast.errors import ProtocolViolation
from holdfast.model.protection import FailurePolicy
from holdfast.model.trees import Tree, reach
from holdfast.types import OutputState

#: With undo/redo the stable state was discarded. This many complete buckets justify rebuilding the
#: state before all tentative buckets can be corrected.
PIECE_BUCKETS = 64
#: Pause before a failed tentative step is retried; the pause doubles each time, up to the limit.
RETRY_US, RETRY_US_MAX = 100_000, 10_000_000

#: The legal state transitions of an output (Borealis figure 5).
MOVES: Mapping[OutputState, tuple[OutputState, ...]] = {
    OutputState.STABLE: (OutputState.UP_FAILURE,),
    OutputState.UP_FAILURE: (OutputState.STABILIZATION,),
    OutputState.STABILIZATION: (OutputState.STABLE, OutputState.UP_FAILURE),
}


class _Missing(NamedTuple):
    """What was missing for the tentative buckets after the previous entry, up to `upto`."""

    upto: int
    missing: tuple[str, ...]
    partial: Partial


class Consistency:
    """The stable and tentative lines of one path."""

    def __init__(
        self,
        policy: Policy,
        sunion: SUnion,
        trees: Mapping[str, Tree],
        me: str = "",
        piece_buckets: int = PIECE_BUCKETS,
        extent: int | None = None,
    ) -> None:
        self.policy, self.sunion, self.trees = policy, sunion, trees
        #: How many buckets back a result depends on its inputs; None: on all earlier buckets.
        self.extent = extent
        self.piece_buckets = piece_buckets
        self.promises = Promises(me, policy.peers)
        #: A path starts by catching up with its inputs.
        self.state = OutputState.STABILIZATION
        #: Number of the tentative line; results of an older line are ignored.
        self.line = 0
        #: Last bucket of the tentative line (None: there is no such line), and the stable bucket
        #: that the line started from.
        self.position: int | None = None
        self.base = 0
        #: First input bucket that the tentative line needs.
        self.needs_from = 0
        self.running_upto: int | None = None
        #: What was missing so far, as far back as the next buckets of the line depend on it.
        self._missing: deque[_Missing] = deque()
        #: The stable state was discarded at the start of the line (undo/redo).
        self.forgotten = False
        #: Consecutive failures of tentative steps, and the time of the next attempt.
        self.failures = 0
        self.retry_at = 0

    def move(self, state: OutputState) -> None:
        if state not in MOVES[self.state]:
            legal = ", ".join(MOVES[self.state])
            raise ProtocolViolation(f"{self.state} cannot become {state}, only {legal}")
        self.state = state

    def begin(self, stable: int, needs_from: int, *, forget: bool = False) -> None:
        """Start a tentative line from the stable state; it replaces an older one."""
        self.line += 1
        self.position = self.base = stable
        self.needs_from = needs_from
        self._missing.clear()
        self.forgotten = forget
        self.failures = 0

    def drop(self) -> None:
        """Drop the tentative line, because the stable line has overtaken it."""
        self.position = self.running_upto = None
        self.forgotten = False

    @property
    def reached(self) -> int:
        """The last bucket that was given tentatively, or is being run."""
        assert self.position is not None
        return self.position if self.running_upto is None else self.running_upto

    def may_redo(self, complete: int, stable: int) -> bool:
        """Whether the stable line may continue while inputs are still missing."""
        return not self.forgotten or complete - stable >= self.piece_buckets

    def worth_restarting(self, stable: int) -> bool:
        """Whether the tentative line should restart from the stable state before it continues."""
        if self.position is None or self.state is not OutputState.UP_FAILURE or self.forgotten:
            return False
        return self.position > stable and stable - self.base >= self.position - stable

    def mode(self, at: int) -> FailurePolicy | None:
        """The policy for buckets that cannot be stable; None: they wait."""
        if self.state is not OutputState.STABILIZATION or self.sunion.missing_since_start:
            return self.policy.on_failure
        policy = self.policy.while_correcting
        return None if policy == "suspend" or self.promises.covered(at) else policy

    def answers(self, at: int) -> bool:
        """Whether the path gives results, stable or tentative, as they become due."""
        if self.state is OutputState.STABILIZATION:
            return self.position is not None and self.mode(at) is not None
        return True

    def failed(self, at: int) -> None:
        """A tentative step failed. The stable line is not affected."""
        self.retry_at = at + min(RETRY_US << min(self.failures, 10), RETRY_US_MAX)
        self.failures += 1

    def due(self, at: int, after: int, *, overtaken: bool = False) -> int:
        """The last bucket that the tentative line has to run now; `after` or less: none.
        `overtaken`: the stable line is about to overtake the tentative line, which then runs only
        buckets whose holding time is over."""
        upto = {stream: self.sunion.available(stream) for stream in self.sunion.complete_upto}
        candidates = [after]
        expired = self.sunion.expired_upto(at)
        if expired is not None:
            candidates.append(expired)
        if self.mode(at) == "process" and not overtaken:
            # An input without a bucket whose holding time is over counts as missing, and later
            # buckets do not wait for it. An input that has returned is waited for again.
            held_upto = max(candidates)
            awaited = [known for known in upto.values() if known is not None and known >= held_upto]
            if awaited:
                candidates.append(min(awaited))
        reached = [to for tree in self.trees.values() if (to := reach(tree, upto)) is not None]
        newest = self.sunion.newest()
        limits = [max(reached, default=after), after if newest is None else newest]
        return min(max(candidates), *limits)

    def run(self, lo: int, hi: int) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...], Partial]:
        """Run the tentative line from `lo` to `hi`. Returns the last bucket of each output, the
        missing inputs, and how partial the results are."""
        upto = {stream: self.sunion.available(stream) for stream in self.sunion.complete_upto}
        self.running_upto = hi
        reached = [(output, reach(tree, upto)) for output, tree in self.trees.items()]
        outputs = tuple((output, min(hi, known)) for output, known in reached if known is not None)
        return (outputs, *self._label(lo, hi))

    def _label(self, lo: int, hi: int) -> tuple[tuple[str, ...], Partial]:
        """What is missing for `lo` to `hi`, in these buckets or in earlier ones that windows and
        state still hold."""
        entries = self._missing
        while entries and self.extent is not None and entries[0].upto < lo - self.extent:
            entries.popleft()
        missing, partial = self.sunion.missing(lo, hi)
        if missing:
            if entries and entries[-1][1:] == (missing, partial):
                entries.pop()
            entries.append(_Missing(hi, missing, partial))
        if not entries:
            return missing, partial
        names = dict.fromkeys(name for entry in entries for name in entry.missing)
        least = Partial(
            min(entry.partial.inputs for entry in entries),
            min(partial.rows, *(entry.partial.rows for entry in entries)),
        )
        if self.extent is None:
            self._missing = deque([_Missing(hi, tuple(names), least)])
        return tuple(names), least
