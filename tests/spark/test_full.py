"""A full disk at the executors: the step raises StorageFull, leaves no files, and is retried."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine.engine import Engine
from holdfast.engine.session import Sessions
from holdfast.engine.state import files_below
from holdfast.errors import StorageFull
from holdfast.model.fragments import fragments
from holdfast.verify.fuzz.engine_run import Files


def test_a_step_that_failed_on_a_full_disk_is_retried(sessions: Sessions, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.touch()
    marker = str(full)

    def echo(state: pa.Table, rows: pa.Table, info: hf.BucketInfo) -> tuple[pa.Table, pa.Table]:
        if os.path.exists(marker) and "b" in rows["k"].to_pylist():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rows, state

    net = hf.Network("full", bucket="1s", partitions=4)
    rows = net.source("s", "ts timestamp, k string", time="ts", clock="manual")
    columns = {"state": "k string", "out": "ts timestamp, k string"}
    net.output("rows", rows.stateful(echo, key="k", **columns))
    times = pa.array([5] * 8, pa.timestamp("us", tz="UTC"))
    files = Files(net, {"s": pa.table({"ts": times, "k": list("abcdefgh")})}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"))
    (path,) = fragments(net)[0].paths
    for _ in range(2):
        with pytest.raises(StorageFull, match="No space left on device"):
            engine.run(path, engine.empty(path, -1), 0, 0, files)
    full.unlink()
    result = engine.run(path, engine.empty(path, -1), 0, 0, files)
    ((_, table),) = result.outputs["rows"]
    assert sorted(table["k"].to_pylist()) == list("abcdefgh")
    engine.release(path, [result.version])
    state = {file for file in files_below(engine.folder) if not file.startswith("job.")}
    assert state == set(result.version.files())
