"""What it costs to verify every file that is read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine import layers, state, step_inputs
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import InputFile
from holdfast.engine.session import Sessions
from holdfast.experiments.versus.workload import EPOCH_US
from holdfast.model.fragments import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.storage.segment import write_segment

WIDTH_US = 100_000
FIRST = EPOCH_US // WIDTH_US
PAGES = "parquet.page.verify-checksum.enabled"


@contextmanager
def unverified(sessions: Sessions) -> Iterator[None]:
    """Neither files nor pages are verified in the driver. Python workers still verify layers."""
    hadoop = sessions.small.sparkContext._jsc.hadoopConfiguration()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "crc32", lambda data, crc=0: 0)
        for module in (state, layers):
            patch.setattr(module, "compare_crc", lambda *args: None)
        for module in (state, step_inputs):
            patch.setattr(module, "check_file", lambda *args: None)
        hadoop.set(PAGES, "false")
        try:
            yield
        finally:
            hadoop.set(PAGES, "true")


def bucket_file(folder: Path, bucket: int, rows: int, keys: int) -> InputFile:
    rng = np.random.default_rng(bucket)
    times = pa.array(bucket * WIDTH_US + np.sort(rng.integers(0, WIDTH_US, rows)), TIMESTAMP)
    names = np.char.add("10.0.0.", rng.integers(0, keys, rows).astype(str))
    table = pa.table({"ts": times, "src": names, "bytes": rng.integers(0, 1_500, rows)})
    path = str(folder / f"{bucket}.parquet")
    file = write_segment(table, path, time="ts", fsync=False)
    return InputFile(bucket, path, rows, file.crc)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rows", "keys", "group"), [(1_000, 100, 1), (200_000, 10_000, 10)])
def test_verified_reads_cost_at_most_five_percent(
    sessions: Sessions, tmp_path: Path, rows: int, keys: int, group: int
) -> None:
    """Steps with and without verification alternate; each kind runs the same buckets."""
    steps = 300 if group == 1 else 60
    warm = steps // 3
    total = (steps + warm) * group if group == 1 else 20 * group
    files = [bucket_file(tmp_path, FIRST + at, rows, keys) for at in range(total)]
    net = hf.Network("verified", bucket="100ms")
    flows = net.source("flows", "ts timestamp, src string, bytes long", time="ts")
    window = flows.window("1s", slide="500ms").group_by("src")
    net.output("out", window.agg(n=hf.count(), bytes=hf.sum("bytes")))
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    engine = Engine(net, sessions, str(tmp_path / "state"), pane_buckets=1)

    class Inputs:
        def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
            return files[max(0, lo - FIRST) : max(0, hi - FIRST + 1)]

    took: dict[str, list[float]] = {"verified": [], "unverified": []}
    version, lo = engine.empty(path, FIRST - 1), FIRST
    for number in range(steps + warm):
        if lo + group - 1 >= FIRST + total:
            version, lo = engine.empty(path, FIRST - 1), FIRST
        results = []
        kinds = ["verified", "unverified"]
        for kind in kinds if number % 2 else kinds[::-1]:
            began = time.perf_counter()
            if kind == "verified":
                results.append(engine.run(path, version, lo, lo + group - 1, Inputs()))
            else:
                with unverified(sessions):
                    began = time.perf_counter()
                    results.append(engine.run(path, version, lo, lo + group - 1, Inputs()))
            if number >= warm:
                took[kind].append(time.perf_counter() - began)
        # Only a version whose files have checksums may continue.
        version = next(r.version for r in results if all(r.version.crcs().values()))
        lo += group
        engine.release(path, [version])
    ratios = [one / other for one, other in zip(took["verified"], took["unverified"], strict=True)]
    medians = {kind: 1_000 * statistics.median(times) for kind, times in took.items()}
    print(f"{rows} rows: {medians}, median of ratios {statistics.median(ratios):.3f}")
    assert statistics.median(ratios) <= 1.05
