"""Where the time of a step goes: timers around the parts of a step of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.storage import Log

ELSE = "everything else"


class Timers:
    """Seconds by part. The time of a part inside another one counts only for the inner part."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._inner_s: list[float] = []
        self.seconds: dict[str, float] = {}

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = self._clock()
            self._inner_s.append(0.0)
            try:
                return function(*args, **options)
            finally:
                took = self._clock() - began
                own = took - self._inner_s.pop()
                if self._inner_s:
                    self._inner_s[-1] += took
                self.seconds[part] = self.seconds.get(part, 0.0) + own

        return timed

    def shares(self, seconds: float) -> dict[str, float]:
        """Share of each part in the time of all steps."""
        parts = {part: round(own / seconds, 3) for part, own in self.seconds.items()}
        return {**parts, ELSE: round(max(0.0, 1 - sum(parts.values())), 3)}


@contextmanager
def timed_parts() -> Iterator[Timers]:
    """Timers around the parts of every step that runs meanwhile, in one thread."""
    from pyspark.sql.classic.dataframe import DataFrame

    from holdfast.engine import step_inputs
    from holdfast.engine.engine import Engine
    from holdfast.engine.prepared import Prepared
    from holdfast.engine.recipe import Builder

    parts: list[tuple[Any, str, str]] = [
        (step_inputs, "check_file", "check of the input files (CRC)"),
        (step_inputs, "read_verified", "reading and checking files"),
        (step_inputs, "read_table", "reading and checking files"),
        (step_inputs, "write_rows", "writing panes"),
        (step_inputs, "sort_canonical", "sorting results"),
        (step_inputs, "canonical", "sorting results"),
        (Prepared, "write", "handing rows to the job"),
        (Prepared, "copy", "handing rows to the job"),
        (Builder, "build", "building the plan"),
        (DataFrame, "toArrow", "Spark job with planning, and toArrow"),
        (Log, "write", "writing result segments"),
        (Log, "commit", "commit"),
        (Engine, "release", "release of old state"),
    ]
    timers = Timers()
    originals = [getattr(owner, name) for owner, name, _ in parts]
    try:
        for (owner, name, part), original in zip(parts, originals, strict=True):
            setattr(owner, name, timers.around(part, original))
        yield timers
    finally:
        for (owner, name, _), original in zip(parts, originals, strict=True):
            setattr(owner, name, original)
