"""Builders for transcripts of a path whose inputs fail: a node in its initial state, events and
expected actions.

Times are microseconds. A bucket may be held for 1000 after its arrival, and for 300 if fragments
upstream have already used up the delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Acknowledge,
    Action,
    BoundaryArrived,
    Change,
    Event,
    InputOpened,
    PathPlan,
    Run,
    RunTentative,
    StepDone,
    TentativeDone,
    Tick,
)
from holdfast.core.sunion import Partial
from holdfast.model.trees import AnyOf, Tree
from holdfast.types import OutputState

STABLE = Change("p", OutputState.STABLE)
UP_FAILURE = Change("p", OutputState.UP_FAILURE)
STABILIZATION = Change("p", OutputState.STABILIZATION)

UNION: Mapping[str, Tree] = {"out": AnyOf(("s1", "s2"))}

DELAY = Policy("delay", "suspend", patience_us=1_000, own_us=300)
PROCESS = replace(DELAY, on_failure="process")

#: One of two inputs is available; the row rates are unknown.
HALF = Partial(0.5, 1.0)


def plan_of(
    policy: Policy, trees: Mapping[str, Tree] = UNION, *inputs: str, convergent: bool = True
) -> PathPlan:
    return PathPlan(
        "p", inputs or ("s1", "s2"), tuple(trees), convergent, extent=3, policy=policy, trees=trees
    )


def stable(*plans: PathPlan, **options: object) -> Progress:
    """A node that is STABLE up to bucket 4, at time 0."""
    core = Progress(plans, checkpoint_buckets=0, **options)  # type: ignore[arg-type]
    streams = dict.fromkeys(stream for plan in plans for stream in plan.inputs)
    for stream in streams:
        core.handle(InputOpened(0, stream, 0, -1))
    for stream in streams:
        core.handle(BoundaryArrived(0, stream, 4))
    for plan in plans:
        actions = core.handle(done(0, 4, plan.name))
        assert actions[-1] == Change(plan.name, OutputState.STABLE)
    return core


def failed(policy: Policy, **options: object) -> Progress:
    """s2 was missing for longer than `max_delay` (X in Borealis): bucket 5 was given as tentative
    at 1100."""
    core = stable(plan_of(policy), **options)
    handle(core, came(100, "s1", 5), Tick(1_100), tentative_done(1_110, 5))
    assert core.paths["p"].consistency.state is OutputState.UP_FAILURE
    return core


def done(at: int, hi: int, path: str = "p") -> StepDone:
    return StepDone(at, path, hi, needs_from=hi + 1, horizon=hi)


def tentative_done(at: int, hi: int | None, line: int = 1) -> TentativeDone:
    return TentativeDone(at, "p", line, hi)


def tentative_run(
    lo: int, hi: int, missing: tuple[str, ...] = ("s2",), line: int = 1, partial: Partial = HALF
) -> RunTentative:
    return RunTentative("p", line, lo, hi, (("out", hi),), missing, partial)


def came(at: int, stream: str, upto: int) -> BoundaryArrived:
    return BoundaryArrived(at, stream, upto)


def handle(core: Progress, *events: Event) -> list[Action]:
    """Actions of the last event, without the acknowledgements to producers."""
    actions: list[Action] = []
    for event in events:
        actions = [a for a in core.handle(event) if not isinstance(a, Acknowledge)]
    return actions


def buckets(actions: list[Action], kind: type[Run] | type[RunTentative]) -> list[int]:
    runs = [action for action in actions if isinstance(action, kind)]
    return [bucket for run in runs for bucket in range(run.lo, run.hi + 1)]
