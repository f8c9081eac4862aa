"""A backlog that is larger than the heap is caught up with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: 3 GB of rows of 1 KB, all of which are results, in a process with a heap of 2 GB. They are pushed
#: at once: the texts are made before, so that the source is faster than the node.
SCRIPT = """
import sys
import numpy as np
import pyarrow as pa
import holdfast as hf

storage, megabytes = sys.argv[1], int(sys.argv[2])
ROWS, WIDTH_US = 5_000, 100_000
net = hf.Network("backlog", bucket="100ms")
source = net.source("s", "ts timestamp, n long, text string", time="ts", clock="manual")
net.output("all", source.filter("n >= 0"))
buckets = megabytes * 1_000_000 // (ROWS * 1_000)
rng = np.random.default_rng(1)
with hf.run(net, storage=storage, options=hf.Options(memory="2g", archive=False)) as run:
    texts = [pa.array([rng.bytes(500).hex() for _ in range(ROWS)]) for _ in range(20)]
    for bucket in range(buckets):
        text = texts[bucket % len(texts)]
        ts = pa.array(np.full(ROWS, bucket * WIDTH_US), pa.timestamp("us", tz="UTC"))
        n = pa.array(np.arange(bucket * ROWS, (bucket + 1) * ROWS))
        run.source("s").push(pa.table({"ts": ts, "n": n, "text": text}))
        run.source("s").advance((bucket + 1) * WIDTH_US)
    run.source("s").end()
    expected = 0
    for rows, info in run.client("all"):
        n = rows["n"].to_numpy()
        assert (n == np.arange(expected, expected + len(n))).all()
        expected += len(n)
    assert expected == buckets * ROWS, expected
print("caught up with", expected, "rows")
"""


@pytest.mark.soak
@pytest.mark.timeout(2_400)
def test_a_backlog_of_three_gigabytes_is_caught_up_with_two_gigabytes_of_heap(
    tmp_path: Path,
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "storage"), "3000"], cwd=ROOT,
        capture_output=True, text=True, timeout=2_300,
    )  # fmt: skip
    assert "caught up with 3000000 rows" in found.stdout, found.stderr[-3_000:]
