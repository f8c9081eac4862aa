"""Holdfast's side of `vs-peers`: the engine reads buckets from a folder and logs its results.

Every step folds its buckets into panes (`pane_buckets=1`), as the peers do. A result counts when
its segment and its record in the log are flushed to disk. The state becomes durable once a second
of stream time, like the checkpoints of the peers. As for the peers, the input is files that exist
already; a run of Holdfast would log them at the source.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import holdfast as hf
from holdfast.clock import now_us
from holdfast.experiments.versus.engine_side import network
from holdfast.experiments.versus.workload import EPOCH_US, WIDTH_US, Query
from holdfast.model.fragments import fragments
from holdfast.storage import Log
from holdfast.storage.files import crc_of
from holdfast.types import SegmentId, Stability

WINDOW_BUCKETS = 10
FIRST = EPOCH_US // WIDTH_US
GROUP_MAX = 10


@dataclass(frozen=True, slots=True)
class Windows:
    """The job, one JSON argument."""

    folder: str
    work: str
    buckets: int
    rows: int
    #: Buckets of one step; 0: all that have arrived, at most `GROUP_MAX`, as a node does.
    group: int = 1


def run_windows(job: Windows) -> dict[str, Any]:
    from holdfast.engine import session
    from holdfast.engine.engine import Engine
    from holdfast.engine.inputs import InputFile
    from holdfast.node.checkpoints import Checkpoints

    paths = [os.path.join(job.folder, f"bucket-{b:06d}.parquet") for b in range(job.buckets)]
    arrived: list[InputFile] = []

    class Inputs:
        def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
            return arrived[max(0, lo - FIRST) : max(0, hi - FIRST + 1)]

    net = network(Query("peers", "tumbling", job.rows, keys=0, warm=0, steps=0))
    root = Path(job.work) / "log"
    log = Log.open(root, "peers", fsync="always")
    engine = Engine(net, session.start(hf.Options()), str(root / "state"), pane_buckets=1)
    (path,) = fragments(net)[0].paths
    log.open_stream("result", engine.compiled.schema["result"], "ts", FIRST)
    checkpoints = Checkpoints("peers", log, engine, now_us)
    version, inputs = engine.empty(path, FIRST - 1), Inputs()
    done_at: dict[int, float] = {}
    lo = 0
    while lo < job.buckets:
        hi = _last_bucket(paths, lo, job.group)
        for bucket in range(lo, hi + 1):
            file = paths[bucket]
            arrived.append(InputFile(FIRST + bucket, file, job.rows, crc_of(file)))
        result = engine.run(path, version, FIRST + lo, FIRST + hi, inputs)
        segments = [
            log.write(table, SegmentId("result", 0, bucket), Stability.STABLE)
            for bucket, table in result.outputs["result"]
        ]
        log.commit("result", segments, FIRST + hi)
        counts = [(_window(segment.id.bucket) + 1) * WINDOW_BUCKETS for segment in segments]
        done_at |= dict.fromkeys([*counts, hi + 1], time.monotonic())
        version = result.version
        if lo // WINDOW_BUCKETS < (hi + 1) // WINDOW_BUCKETS:
            checkpoints.write(version)
        engine.release(path, [version])
        lo = hi + 1
    _write_results(log, Path(job.work) / "out", job.buckets)
    log.close()
    return {"done_at": sorted(done_at.items()), "versions": {"holdfast": hf.__version__}}


def _window(bucket: int) -> int:
    return (bucket - FIRST) // WINDOW_BUCKETS


def _last_bucket(paths: list[str], lo: int, group: int) -> int:
    """Wait for the buckets of the next step, from `lo` on."""
    least, most = (group, group) if group else (1, GROUP_MAX)
    end = min(lo + least, len(paths))
    while not os.path.exists(paths[end - 1]):
        time.sleep(0.001)
    while end < min(lo + most, len(paths)) and os.path.exists(paths[end]):
        end += 1
    return end - 1


def _write_results(log: Log, out: Path, buckets: int) -> None:
    """Copy the logged results to one file for each window, as the peers write them."""
    out.mkdir(parents=True)
    for segment in log.segments("result", FIRST, FIRST + buckets):
        window = _window(segment.id.bucket)
        table = log.read(segment).select(["src", "n", "bytes"])
        pq.write_table(table, out / f"window-{window:06d}.parquet")


if __name__ == "__main__":
    print(json.dumps(run_windows(Windows(**json.loads(sys.argv[1])))), flush=True)
