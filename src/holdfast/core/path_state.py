"""What `progress` knows of one path."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.consistency import Consistency
from holdfast.core.progress_events import PathPlan
from holdfast.core.sunion import SUnion


@dataclass(slots=True)
class PathState:
    plan: PathPlan
    sunion: SUnion
    consistency: Consistency
    #: Where a durable version stands, from where on it needs its inputs, and where they began.
    resumed: tuple[int, int, int] | None
    origins: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Last bucket computed and logged; None before Start.
    position: int | None = None
    #: A Run that is under way goes up to here.
    running_upto: int | None = None
    #: First bucket the current version refers to, and the newest durable one.
    needs_from: int = 0
    durable: tuple[int, int] | None = None
    #: Rows of buckets that wait, oldest first.
    waiting: list[tuple[int, int]] = field(default_factory=list)
    horizon: int = 0
    #: Greatest boundary of any input.
    ended_upto: int | None = None
    ended: bool = False
    origin: int = 0
    #: Steps in a row that took everything that was complete when they began.
    steps_caught_up: int = 0
    #: When the last step began, a later bucket had been held as long as may be.
    passed_over: bool = False

    @property
    def reached(self) -> int | None:
        """The last bucket it has given, stable or tentative; None before Start."""
        guessed = self.consistency.position
        if self.position is None or guessed is None:
            return self.position
        return max(self.position, guessed)


def path_state(
    plan: PathPlan, resumed: tuple[int, int, int] | None, me: str, piece: int
) -> PathState:
    policy = plan.policy
    patience_us = None if policy.on_failure == "block" else policy.patience_us
    sunion = SUnion(plan.inputs, patience_us, policy.own_us)
    if resumed is not None:
        sunion.resume(resumed[0])
    extent = plan.extent if plan.convergent else None
    consistency = Consistency(policy, sunion, plan.trees, me, piece, extent)
    return PathState(plan, sunion, consistency, resumed)
