"""Fixtures: a small real disk that can be filled or mounted read-only, and rows to write."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

SCHEMA = "ts timestamp, src string, bytes bigint"


@pytest.fixture
def rows() -> Callable[..., pa.Table]:
    """`rows(bucket, count)`: rows of a one-second bucket, different for every bucket."""

    def make(bucket: int, count: int = 5) -> pa.Table:
        rng = np.random.default_rng(abs(bucket))
        times = bucket * 1_000_000 + rng.integers(0, 1_000_000, count)
        names = [f"10.0.0.{host}" for host in rng.integers(0, 99, count)]
        columns = {"ts": pa.array(times, pa.timestamp("us", "UTC")), "src": names}
        return pa.table(columns | {"bytes": rng.integers(0, 10_000, count)})

    return make


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
