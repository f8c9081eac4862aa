"""A process with one JVM that runs the queries of one side, one after another.

The process gets a `Job` as JSON and prints the measures of each query as one line of JSON. Both
sides run the same queries in the same order, so that both have the same warm-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import holdfast as hf
from holdfast.errors import HoldfastError
from holdfast.experiments.versus import count_ways, engine_side, streaming_side
from holdfast.experiments.versus.kill import kill_group
from holdfast.experiments.versus.spark_session import ROCKSDB, STREAMING, start_session
from holdfast.experiments.versus.workload import Buckets, Query

Side = Literal["holdfast", "installed", "tuned", "tuned-rocksdb"]
#: Time limit of a process, in seconds.
LIMIT_S = 1_200.0


@dataclass(frozen=True, slots=True)
class Job:
    side: Side
    #: Folder of the buckets.
    folder: str
    queries: tuple[Query, ...]
    jar: str | None = None
    #: Queries that Holdfast also runs in its default mode, which folds rows when a window closes.
    lazy: tuple[Query, ...] = ()
    #: The way of a count window in Structured Streaming.
    way: str = "foreachBatch"
    #: Name of the query of which Holdfast measures where the time goes.
    profile: str | None = None


def run_job(job: Job) -> dict[str, Any]:
    """Run a job in this process."""
    buckets = Buckets(Path(job.folder))
    if job.side == "holdfast":
        return _holdfast(job, buckets)
    spark = start_session(job.side, job.jar)
    try:
        results = {}
        for query in job.queries:
            if query.kind == "count":
                if job.way == "transformWithStateInPandas":
                    spark.conf.set(f"{STREAMING}.stateStore.providerClass", ROCKSDB)
                result, sink = count_ways.way_of(job.way)
                results[query.name] = streaming_side.run_query(
                    spark, query, buckets, result=result, sink=sink
                )
            else:
                sink_of = None if query.kind == "stateless" else streaming_side.arrow_sink
                results[query.name] = streaming_side.run_query(spark, query, buckets, sink=sink_of)
        return results
    finally:
        spark.stop()


def _holdfast(job: Job, buckets: Buckets) -> dict[str, Any]:
    from holdfast.engine import session

    sessions = session.start(hf.Options())
    try:
        results = {
            query.name: engine_side.run_query(sessions, query, buckets, eager=True)
            for query in job.queries
        }
        for query in job.lazy:
            results[query.name] = engine_side.run_query(sessions, query, buckets, eager=False)
        for query in job.queries:
            if query.name == job.profile:
                results["profile"] = engine_side.profile_query(sessions, query, buckets)
        return results
    finally:
        sessions.stop()


def start_module(module: str, argument: Any) -> subprocess.Popen[str]:
    """Start a module of the comparison in a process group of its own, which ends with `end`."""
    environment = {**os.environ, "TZ": "UTC"}
    return subprocess.Popen(
        [sys.executable, "-m", f"holdfast.experiments.versus.{module}", json.dumps(argument)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def answer_of(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Any:
    """The last line of JSON that a process prints; the process has then ended."""
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill_group(process)
        raise HoldfastError(f"{process.args!r} took longer than {limit_s:.0f} s") from None
    except BaseException:
        kill_group(process)
        raise
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        last = "; ".join(errors.strip().splitlines()[-3:])
        raise HoldfastError(f"{process.args!r} failed: {last}")
    return json.loads(lines[-1])


def in_process(job: Job) -> dict[str, Any]:
    """Run a job in a fresh process and JVM."""
    answer: dict[str, Any] = answer_of(start_module("job", asdict(job)))
    return answer


def _queries(plain: Sequence[dict[str, Any]]) -> tuple[Query, ...]:
    return tuple(Query(**query) for query in plain)


def main() -> None:
    plain = json.loads(sys.argv[1])
    queries, lazy = _queries(plain.pop("queries")), _queries(plain.pop("lazy"))
    time.tzset()
    print(json.dumps(run_job(Job(queries=queries, lazy=lazy, **plain))), flush=True)


if __name__ == "__main__":
    main()
