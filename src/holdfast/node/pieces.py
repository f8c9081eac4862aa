"""Computes buckets whose results nobody needs, only the state after them, in as many steps as they
take."""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast.core.job_size import JobLimits, JobSize
from holdfast.core.progress_events import Run
from holdfast.engine.inputs import OnResults, StepResult
from holdfast.engine.state import Line, Version
from holdfast.errors import TooLarge
from holdfast.model.fragments import Path
from holdfast.node.node_events import StepEngine


def run_in_pieces(
    engine: StepEngine, path: Path, version: Version, lo: int, hi: int, inputs: Any, line: Line
) -> StepResult:
    """Compute buckets lo..hi and return the result of the last step. A step whose results are too
    large is split."""
    job_size = JobSize(JobLimits())
    while True:
        upto = job_size.last((), lo - 1, hi)
        try:
            result = engine.run(path, version, lo, upto, inputs, line=line)
        except TooLarge:
            if not job_size.too_large(upto - lo + 1):
                raise
            continue
        job_size.fitted(upto - lo + 1)
        if upto == hi:
            return result
        version, lo = result.version, upto + 1


def run_stable(
    engine: StepEngine, path: Path, version: Version, work: Run, inputs: Any, on_results: OnResults
) -> StepResult:
    """Compute the buckets of a stable step. If the state is rebuilt and the results are too large,
    the state before the first result is computed by itself."""
    run = partial(engine.run, path, on_results=on_results, upkeep=work.upkeep)
    try:
        return run(version, work.lo, work.hi, inputs)
    except TooLarge:
        first = work.rebuild_from
        if first is None or first <= work.lo:
            raise
        before = run_in_pieces(engine, path, version, work.lo, first - 1, inputs, "stable")
        return run(before.version, first, work.hi, inputs)
