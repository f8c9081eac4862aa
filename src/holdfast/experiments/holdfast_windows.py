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
from holdfast.experiments.structured_streaming import EPOCH_US
from holdfast.experiments.vs_structured_streaming import WIDTH_US, Job, network
from holdfast.model.fragments import fragments
from holdfast.storage import Log
from holdfast.storage.files import crc_of
from holdfast.types import SegmentId, Stability

WINDOW_BUCKETS = 10
FIRST = EPOCH_US // WIDTH_US


@dataclass(frozen=True, slots=True)
class Windows:
    """The job, one JSON argument."""

    folder: str
    work: str
    buckets: int
    rows: int
    #: Buckets of one step.
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

    net = network(Job())
    root = Path(job.work) / "log"
    log = Log.open(root, "peers", fsync="always")
    engine = Engine(net, session.start(hf.Options()), str(root / "state"), pane_buckets=1)
    (path,) = fragments(net)[0].paths
    log.open_stream("result", engine.compiled.schema["result"], "ts", FIRST)
    checkpoints = Checkpoints("peers", log, engine, now_us)
    version, inputs = engine.empty(path, FIRST - 1), Inputs()
    done_at: list[tuple[int, float]] = []
    for lo in range(0, job.buckets, job.group):
        hi = min(lo + job.group, job.buckets) - 1
        for bucket in range(lo, hi + 1):
            while not os.path.exists(paths[bucket]):
                time.sleep(0.001)
            file = paths[bucket]
            arrived.append(InputFile(FIRST + bucket, file, job.rows, crc_of(file)))
        result = engine.run(path, version, FIRST + lo, FIRST + hi, inputs)
        segments = [
            log.write(table, SegmentId("result", 0, bucket), Stability.STABLE)
            for bucket, table in result.outputs["result"]
        ]
        log.commit("result", segments, FIRST + hi)
        done_at.append((hi + 1, time.monotonic()))
        version = result.version
        if (hi + 1) % WINDOW_BUCKETS == 0:
            checkpoints.write(version)
        engine.release(path, [version])
    _write_results(log, Path(job.work) / "out", job.buckets)
    log.close()
    return {"done_at": done_at, "versions": {"holdfast": hf.__version__}}


def _write_results(log: Log, out: Path, buckets: int) -> None:
    """Copy the logged results to one file for each window, as the peers write them."""
    out.mkdir(parents=True)
    for segment in log.segments("result", FIRST, FIRST + buckets):
        window = (segment.id.bucket - FIRST) // WINDOW_BUCKETS
        table = log.read(segment).select(["src", "n", "bytes"])
        pq.write_table(table, out / f"window-{window:06d}.parquet")


if __name__ == "__main__":
    print(json.dumps(run_windows(Windows(**json.loads(sys.argv[1])))), flush=True)
