"""What a path does while inputs are missing, and while it is corrected (Borealis sections 3.3 and
3.4). Pure.

Beside the *stable line*, the buckets that were run on complete input, a path may have a *tentative
line*: buckets run on what was there, from the stable state on. Blocking is the first defence: it
begins only when a bucket has been held for X. From then on the path is in UP_FAILURE. The stable
line goes on with whatever becomes complete; once every bucket that was given tentatively is, the
rest is redone (STABILIZATION). A tentative result stands until the stable one of the same bucket
takes its place; when the stable line has overtaken the tentative one, that one is dropped.

The work is in proportion to what changed: a bucket is run once on each line. The tentative line is
started again from the stable state only when at least as many buckets were corrected as it has to
repeat, so that what it answers does not stay behind what is known.
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

#: Where the stable state was given up (undo/redo), so many complete buckets are worth rebuilding
#: it, although a newer part of the failure is not corrected yet.
PIECE_BUCKETS = 64
#: A tentative step that failed is tried again after so long, doubled each time up to the limit.
RETRY_US, RETRY_US_MAX = 100_000, 10_000_000

#: The legal moves of an output (Borealis figure 5).
MOVES: Mapping[OutputState, tuple[OutputState, ...]] = {
    OutputState.STABLE: (OutputState.UP_FAILURE,),
    OutputState.UP_FAILURE: (OutputState.STABILIZATION,),
    OutputState.STABILIZATION: (OutputState.STABLE, OutputState.UP_FAILURE),
}


class _Lacked(NamedTuple):
    """Buckets of a tentative line up to `upto`, since the entry before, lacked this."""

    upto: int
    missing: tuple[str, ...]
    partial: Partial


class Consistency:
    """Of one path."""

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
        #: How many buckets back a result depends on its inputs; None: on all of them.
        self.extent = extent
        self.piece_buckets = piece_buckets
        self.promises = Promises(me, policy.peers)
        #: At first a path catches up with its inputs.
        self.state = OutputState.STABILIZATION
        #: Number of the tentative line; what belongs to an older one does not count.
        self.line = 0
        #: Last bucket of the tentative line, and the stable one it started from; None: there is no
        #: such line.
        self.position: int | None = None
        self.base = 0
        #: From where on the line needs the inputs.
        self.needs_from = 0
        self.running_upto: int | None = None
        #: What the line lacked so far, as far back as its next buckets depend on it.
        self._lacked: deque[_Lacked] = deque()
        #: The stable state was given up with the start of the line.
        self.forgotten = False
        #: Tentative steps that failed one after the other, and when to try again.
        self.failures = 0
        self.retry_at = 0

    def move(self, state: OutputState) -> None:
        if state not in MOVES[self.state]:
            legal = ", ".join(MOVES[self.state])
            raise ProtocolViolation(f"{self.state} cannot become {state}, only {legal}")
        self.state = state

    def begin(self, stable: int, needs_from: int, *, forget: bool = False) -> None:
        """A tentative line starts from the stable one, in place of an older one."""
        self.line += 1
        self.position = self.base = stable
        self.needs_from = needs_from
        self._lacked.clear()
        self.forgotten = forget
        self.failures = 0

    def drop(self) -> None:
        """The stable line has overtaken the tentative one."""
        self.position = self.running_upto = None
        self.forgotten = False

    @property
    def reached(self) -> int:
        """The last bucket that was, or is about to be, given tentatively."""
        assert self.position is not None
        return self.position if self.running_upto is None else self.running_upto

    def may_redo(self, complete: int, stable: int) -> bool:
        """Whether the stable line may go on while inputs are still missing."""
        return not self.forgotten or complete - stable >= self.piece_buckets

    def worth_restarting(self, stable: int) -> bool:
        """Whether the line should start again from the stable state before it goes on."""
        if self.position is None or self.state is not OutputState.UP_FAILURE or self.forgotten:
            return False
        return self.position > stable and stable - self.base >= self.position - stable

    def mode(self, at: int) -> FailurePolicy | None:
        """What becomes of buckets that cannot be stable; None: they wait."""
        if self.state is not OutputState.STABILIZATION or self.sunion.lacks_since_start:
            return self.policy.on_failure
        healing = self.policy.while_correcting
        return None if healing == "suspend" or self.promises.covered(at) else healing

    def answers(self, at: int) -> bool:
        """It gives results, stable or tentative, as they become due."""
        if self.state is OutputState.STABILIZATION:
            return self.position is not None and self.mode(at) is not None
        return True

    def failed(self, at: int) -> None:
        """A tentative step failed; the stable line is not touched by it."""
        self.retry_at = at + min(RETRY_US << min(self.failures, 10), RETRY_US_MAX)
        self.failures += 1

    def due(self, at: int, after: int, *, overtaken: bool = False) -> int:
        """The last bucket behind `after` that may not wait any longer. Where the stable line is
        about to overtake this one, only what has been held as long as may be still runs here."""
        upto = {stream: self.sunion.available(stream) for stream in self.sunion.complete_upto}
        found = [after]
        expired = self.sunion.expired_upto(at)
        if expired is not None:
            found.append(expired)
        if self.mode(at) == "process" and not overtaken:
            # What lacks a bucket that was held so long is missing, and not waited for with the next
            # ones; what came back is waited for again.
            held = max(found)
            awaited = [known for known in upto.values() if known is not None and known >= held]
            if awaited:
                found.append(min(awaited))
        reached = [to for tree in self.trees.values() if (to := reach(tree, upto)) is not None]
        newest = self.sunion.newest()
        limits = [max(reached, default=after), after if newest is None else newest]
        return min(max(found), *limits)

    def run(self, lo: int, hi: int) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...], Partial]:
        """The line goes on to `hi`: up to where each output does, what is missing, how partial."""
        upto = {stream: self.sunion.available(stream) for stream in self.sunion.complete_upto}
        self.running_upto = hi
        reached = [(output, reach(tree, upto)) for output, tree in self.trees.items()]
        outputs = tuple((output, min(hi, known)) for output, known in reached if known is not None)
        return (outputs, *self._label(lo, hi))

    def _label(self, lo: int, hi: int) -> tuple[tuple[str, ...], Partial]:
        """What `lo` to `hi` lack, themselves or in earlier buckets that windows and state hold."""
        lacked = self._lacked
        while lacked and self.extent is not None and lacked[0].upto < lo - self.extent:
            lacked.popleft()
        missing, partial = self.sunion.missing(lo, hi)
        if missing:
            if lacked and lacked[-1][1:] == (missing, partial):
                lacked.pop()
            lacked.append(_Lacked(hi, missing, partial))
        if not lacked:
            return missing, partial
        names = dict.fromkeys(name for before in lacked for name in before.missing)
        least = Partial(
            min(before.partial.inputs for before in lacked),
            min(partial.rows, *(before.partial.rows for before in lacked)),
        )
        if self.extent is None:
            self._lacked = deque([_Lacked(hi, tuple(names), least)])
        return tuple(names), least
