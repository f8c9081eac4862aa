"""What a path does while inputs are missing, and while it is corrected (Borealis sections 3.3 and
3.4). Pure.

Beside the *stable line*, the buckets that were run on whole input, a path may have a *tentative
line*: buckets run on what was there, from the stable state on. Blocking is the first defence: it
begins only when a bucket has been held for X. From then on the path is in UP_FAILURE, and the
stable line stands still until every bucket that was given tentatively is whole; then it is redone
from the state it was left in (STABILIZATION). When it has caught up with the tentative line, that
one is dropped: the failure is corrected (REC_DONE). A new failure meanwhile ends it too: the next
tentative line starts where the stable one got to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.core.sunion import SUnion
from holdfast.model.protection import FailurePolicy, HealingPolicy, Reconcile
from holdfast.model.trees import Tree, reach
from holdfast.types import OutputState

#: A failure whose older part is corrected while a newer part is not is reconciled in pieces of so
#: many buckets, so that an input which is always late does not keep everything for ever.
PIECE_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Policy:
    failure: FailurePolicy = "block"
    stabilization: HealingPolicy = "suspend"
    reconcile: Reconcile = "checkpoint"
    #: How long a bucket may be held that came in time, and one that was held before.
    patience_us: int = 0
    own_us: int = 0
    #: Other replicas, one of which may go on answering while this one corrects itself.
    partners: tuple[str, ...] = ()


#: Partners that refused are asked again after so long.
ASK_AGAIN_US = 200_000

#: What partners say when asked to postpone their own reconciliation: one of them does and goes on
#: answering; they are correcting themselves; there is nobody who could.
Answer = Literal["postponed", "refused", "alone"]


def together(answers: Iterable[Answer]) -> Answer:
    """What the answers of all partners come to: one that goes on answering is enough."""
    found = set(answers)
    return "postponed" if "postponed" in found else "refused" if "refused" in found else "alone"


class Consistency:
    """Of one path."""

    def __init__(
        self,
        policy: Policy,
        sunion: SUnion,
        trees: Mapping[str, Tree],
        piece_buckets: int = PIECE_BUCKETS,
    ) -> None:
        self.policy, self.sunion, self.trees = policy, sunion, trees
        self.piece_buckets = piece_buckets
        #: At first a path catches up with its inputs.
        self.state = OutputState.STABILIZATION
        #: Number of the tentative line; what belongs to an older one does not count.
        self.line = 0
        #: Last bucket of the tentative line; None: there is none.
        self.position: int | None = None
        self.running_upto: int | None = None
        #: What partners said of the reconciliation at hand.
        self.answer: Answer | None = None
        self.asked = False
        #: The partner that corrects itself while this one answers.
        self.postponed_for: str | None = None
        #: The Tick that was asked for.
        self.wake_at: int | None = None

    def begin(self, stable: int) -> None:
        """UP_FAILURE: a tentative line starts from the stable one."""
        assert self.position is None
        self.line += 1
        self.position = stable
        self.state = OutputState.UP_FAILURE
        self.answer, self.asked = None, False

    def drop(self) -> None:
        """The tentative line is over."""
        self.position = self.running_upto = None
        self.answer, self.asked = None, False

    def corrected(self, whole: int, stable: int) -> bool:
        """Every bucket that was given tentatively is whole (REC_REQUEST)."""
        assert self.position is not None
        reached = self.position if self.running_upto is None else self.running_upto
        return whole >= reached or whole - stable >= self.piece_buckets

    @property
    def asks(self) -> bool:
        """Whether partners have a say in when this path corrects itself."""
        return bool(self.policy.partners) and self.policy.stabilization != "suspend"

    @property
    def mode(self) -> FailurePolicy | None:
        """What becomes of buckets that cannot be stable; None: they wait."""
        if self.state is not OutputState.STABILIZATION:
            return self.policy.failure
        healing = self.policy.stabilization
        return None if healing == "suspend" or self.answer == "postponed" else healing

    @property
    def correcting(self) -> bool:
        """It corrects itself, or waits for leave to."""
        healing = self.state is OutputState.STABILIZATION
        return self.asked or (healing and self.position is not None)

    def asked_by(self, partner: str, me: str) -> Answer:
        """May a partner correct itself while this one goes on answering? Where both want to, the
        first by name goes first."""
        if self.state is OutputState.STABILIZATION:
            return "refused" if self.position is not None else "alone"
        if self.asked and me < partner:
            return "refused"
        self.postponed_for = partner
        return "postponed"

    def due(self, at: int, after: int, *, overtaken: bool = False) -> int:
        """The last bucket behind `after` that may not wait any longer. Where the stable line is
        about to overtake this one, only what has been held as long as may be still runs here."""
        upto = {stream: self.sunion.available(stream) for stream in self.sunion.complete_upto}
        found = [after]
        expired = self.sunion.expired_upto(at)
        if expired is not None:
            found.append(expired)
        if self.mode == "process" and not overtaken:
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

    def run(self, hi: int) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
        """The line goes on to `hi`: up to where each output does, and what is missing."""
        upto = {stream: self.sunion.available(stream) for stream in self.sunion.complete_upto}
        self.running_upto = hi
        reached = [(output, reach(tree, upto)) for output, tree in self.trees.items()]
        lacked = sorted(s for s, known in upto.items() if known is None or known < hi)
        for stream in sorted(self.sunion.tentative_upto):
            lacked += self.sunion.lacked[stream]
        return (
            tuple((output, min(hi, known)) for output, known in reached if known is not None),
            tuple(dict.fromkeys(lacked)),
        )
