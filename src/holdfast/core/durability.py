"""When the state of a path is made durable: every so many buckets, or earlier, for a short recovery
(`eventual_checkpoint.py`). Pure. Checkpoints are written beside the steps, one of a path at a
time."""

from __future__ import annotations

from holdfast.core.eventual_checkpoint import Named, Stepped
from holdfast.core.path_state import PathState
from holdfast.core.progress_events import (
    Action,
    Checkpoint,
    CheckpointDone,
    RecoveryDone,
    StepDone,
)
from holdfast.types import NO_UPKEEP, Upkeep


def after_step(
    path: PathState, event: StepDone, rows: dict[int, int], interval: int
) -> list[Action]:
    """`rows`: input rows of the step by bucket; `interval`: most buckets between two checkpoints,
    0 for no limit."""
    last, control = path.durable[0] if path.durable else path.origin - 1, path.eventual
    is_due = bool(interval) and event.hi - last >= interval
    actions: list[Action] = []
    if control is not None:
        recovery = control.recovery
        step = Stepped(
            event.hi, rows, event.entries, event.open, event.took_us, event.layered, event.merging
        )
        control.stepped(step)
        if recovery is not None and control.recovery_us is not None and control.recovery is None:
            took_us, stated_us = control.recovery_us, control.targets.recovery_us
            actions.append(
                RecoveryDone(event.path, took_us, stated_us, recovery.load_us, recovery.replay_us)
            )
        is_due |= control.is_due(event.at, path.needs_from)
    return [*actions, *(_requested(path, event.at) if is_due else ())]


def at_once(path: PathState, at: int) -> list[Action]:
    """The current state must become durable, unless it is already."""
    if path.position is None or (path.durable is not None and path.durable[0] >= path.position):
        return []
    path.flushes_again = path.flushing
    return _requested(path, at)


def _requested(path: PathState, at: int) -> list[Action]:
    assert path.position is not None
    rebuilds = path.rebuilds and path.running_upto is not None
    if path.flushing or rebuilds or path.consistency.forgotten:
        return []  # files of a state that was discarded may be deleted; later steps ask again
    path.flushing, control = True, path.eventual
    if control is None:
        return [Checkpoint(path.plan.name, path.position)]
    control.began(at)
    return [Checkpoint(path.plan.name, path.position, control.costs.body())]


def done(path: PathState, event: CheckpointDone) -> list[Action]:
    path.flushing, path.durable = False, (event.bucket, event.needs_from)
    if path.eventual is not None:
        record = Named(event.needs_from, event.entries, event.new_entries, event.took_us)
        path.eventual.named(event.at, record)
    again, path.flushes_again = path.flushes_again, False
    return at_once(path, event.at) if again else []


def failed(path: PathState, at: int) -> list[Action]:
    """The disk was full. What was to become durable is part of the current state."""
    path.flushing = path.flushes_again = False
    return _requested(path, at)


def upkeep(path: PathState, hi: int, at: int) -> Upkeep:
    """What the next step, up to bucket `hi`, does to shorten a recovery."""
    if path.eventual is None:
        return NO_UPKEEP
    return path.eventual.upkeep(at, path.needs_from, path.waiting_rows(hi))
