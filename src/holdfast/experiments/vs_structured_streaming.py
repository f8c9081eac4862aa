"""The same queries on Holdfast and on Structured Streaming, like for like and each at its best.

Both sides process the same Parquet buckets with the same number of buckets per step, in one JVM per
side and repeat, and write Parquet without fsync. Five repeats of the sides alternate. The latency
of a result runs from the start of the step in which it is due to the moment at which a consumer can
read it. Holdfast is `eager`: it folds every bucket into its state at once, as Structured Streaming
does. Its default, `lazy`, does less work with small buckets and is reported under names of its own.

`end_to_end` adds what the steps leave out: source log, fsync, transport and client, against files
that arrive, an fsynced sink and a polling reader. `realtime` compares with the real-time mode of
Structured Streaming. docs/experiments.md explains each definition.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from holdfast.experiments.versus import pictures, realtime, summary
from holdfast.experiments.versus.count_ways import WAYS, check_protobuf
from holdfast.experiments.versus.java_classes import compile_classes
from holdfast.experiments.versus.job import Job, Side, answer_of, in_process, start_module
from holdfast.experiments.versus.workload import Buckets, Query

#: Queries that the installed form also runs; the tuned form runs all.
HEADLINE = ("tumbling", "large", "large_10")
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """How long each measurement takes."""

    queries: tuple[Query, ...]
    lazy: tuple[Query, ...]
    #: The count windows of the two ways that call a function per key.
    slow_count: Query
    sides: tuple[Side, ...]
    #: Seconds of warm-up and of measurement while rows arrive.
    warm_s: float
    live_s: float
    #: Rows that real-time mode gets at once.
    backlog: int
    repeats: int = REPEATS


def size_of(quick: bool) -> Size:
    more = 1 if quick else 3
    return Size(
        # The JVM still gets faster after a hundred batches. So the headline queries come last.
        queries=(
            Query("stateless", "stateless", 200_000, 10_000, warm=4 * more, steps=10),
            Query("count", "count", 100_000, 100_000, prefill=5, warm=4 * more, steps=8),
            Query("join", "join", 1_000, 1_000, prefill=10, warm=15 * more, steps=20 * more),
            Query("sliding", "sliding", 1_000, 100, prefill=100, warm=10 * more, steps=20 * more),
            Query("tumbling", "tumbling", 1_000, 100, warm=50 * more, steps=40 * more),
            Query("large", "tumbling", 200_000, 10_000, warm=10 * more, steps=20),
            Query("large_10", "tumbling", 200_000, 10_000, warm=3, steps=6, group=10, start=5),
        ),
        lazy=(
            Query("lazy_tumbling", "tumbling", 1_000, 100, warm=100 * more, steps=100 * more),
            Query("lazy_large", "tumbling", 200_000, 10_000, warm=20, steps=40),
        ),
        slow_count=Query("count", "count", 100_000, 100_000, warm=1, steps=1 if quick else 3),
        sides=("holdfast", "tuned", "installed", *(() if quick else ("tuned-rocksdb",))),
        warm_s=20 if quick else 40,
        live_s=10 if quick else 30,
        backlog=20_000,
    )


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    return measure(size_of(quick), say)


def measure(size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements. The folder with the buckets is deleted at the end."""
    check_protobuf()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-versus-"))
    try:
        jar = compile_classes(folder / "java")
        if jar is None:
            say("no Java compiler: tuned without the file system that does not fork, and no "
                "real-time mode")  # fmt: skip
        buckets = Buckets(folder / "buckets")
        for query in (
            *size.queries, *_headline(size.queries), *size.lazy, size.slow_count,
        ):  # fmt: skip
            buckets.write(query)
        say("wrote the buckets")
        found = _repeats(size, str(buckets.folder), jar, say)
        for way in WAYS[:2]:
            job = Job("tuned", str(buckets.folder), (size.slow_count,), jar, way=way)
            measures = in_process(job)["count"]
            found.setdefault(f"count {way}", {}).setdefault("tuned", []).append(measures)
            say(f"count windows with {way}: {summary.middle(measures['step_ms']):,.0f} ms a step")
        end_to_end = _end_to_end(size, jar, say)
        live = _realtime(size, jar, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**summary.summarize(found), "end_to_end": end_to_end, "realtime": live,
            "no_fork": jar is not None}  # fmt: skip


def _headline(queries: tuple[Query, ...]) -> tuple[Query, ...]:
    """The queries of the installed form. Its first one has twice the warm-up, because the other
    sides have run other queries before."""
    first, *others = (query for query in queries if query.name in HEADLINE)
    return (replace(first, warm=2 * first.warm), *others)


def _repeats(
    size: Size, folder: str, jar: str | None, say: Callable[[str], None]
) -> dict[str, dict[str, list[Any]]]:
    """Measures by query, side and repeat. The order of the sides alternates."""
    found: dict[str, dict[str, list[Any]]] = {}
    for repeat in range(size.repeats):
        for side in size.sides if repeat % 2 == 0 else reversed(size.sides):
            job = Job(side, folder, size.queries, jar)
            if side == "installed":
                job = replace(job, queries=_headline(size.queries))
            elif side == "holdfast":
                job = replace(job, lazy=size.lazy, profile=None if repeat else "large")
            results = in_process(job)
            for name, measures in results.items():
                found.setdefault(name, {}).setdefault(side, []).append(measures)
            say(f"repeat {repeat + 1} of {size.repeats}, {side}: {summary.one_line(results)}")
    return found


def _live(measure: str, **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = answer_of(
        start_module("live_holdfast", {"measure": measure, **options}), 300
    )
    return answer


def _end_to_end(size: Size, jar: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    # Arriving buckets start only some batches per second, and a JVM needs a hundred of them.
    waits = {"warm_s": 1.5 * size.warm_s, "seconds": size.live_s}
    ours = _live("delays", rows_per_s=10_000, **waits)
    options = {"jar": jar, "rows_per_bucket": 1_000, **waits}
    theirs = answer_of(start_module("live_spark", options), 300)
    say(f"end to end: {ours['final_ms']:.0f} ms, Structured Streaming {theirs['final_ms']:.0f} ms")
    return summary.beside(ours, theirs)


def _realtime(size: Size, jar: str | None, say: Callable[[str], None]) -> dict[str, Any] | None:
    if jar is None:
        return None
    # Several batches of real-time mode end in this time.
    waits = {"warm_s": size.warm_s, "seconds": max(size.live_s, 3.0 * realtime.BATCH_S)}
    ours = _live("delays", rows_per_s=1_000, **waits)
    ours["rows_per_s"] = _live("rate", warm_s=size.warm_s, seconds=size.live_s / 2)["rows_per_s"]
    theirs = realtime.measure(jar, backlog=size.backlog, **waits)
    kill = {"warm_s": size.warm_s / 4, "seconds": size.live_s / 4}
    ours |= _live("kill", replicas=2, **kill)
    alone = _live("kill", replicas=1, **kill)
    theirs |= realtime.measure_kill(jar, **kill)
    result = summary.realtime(ours, theirs, alone)
    say(f"real-time mode: {result}")
    return result


def table(result: dict[str, Any]) -> Table:
    return summary.table(result)


def plot(result: dict[str, Any], folder: str) -> list[str]:
    return pictures.plot(result, folder)
