"""Count windows with partial aggregates as state give the same bits as those with rows as state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine.compiled import Compiled, compile_network
from holdfast.engine.engine import Engine
from holdfast.engine.session import Sessions
from holdfast.model.fragments import fragments
from holdfast.storage.rows import digest, sort_canonical
from holdfast.verify.fuzz.engine_run import LIMITS, Files, Jobs
from tests.spark import oracles

#: Of all types whose partials Arrow can merge. `x` and `y` are doubles with NaN, nulls and zeros.
FOLDED = {
    "n": hf.count(), "nx": hf.count("x"), "si": hf.sum("i"), "ai": hf.avg("i"), "mi": hf.min("i"),
    "sx": hf.sum("x"), "ay": hf.avg("y"), "dy": hf.stddev("y"), "vi": hf.stddev("i"),
    "hw": hf.max("w"), "q": hf.quantile("y", 0.5),
}  # fmt: skip
ROWS_NEEDED = (
    {"m": hf.max("x")}, {"d": hf.sum("d")}, {"f": hf.first("i")}, {"t": hf.top_k("w", 2)},
    {"s": hf.sum("i"), "a": hf.approx_distinct("i")},
)  # fmt: skip


def network(aggregates: dict[str, Any], slide: int | None = None) -> hf.Network:
    net = hf.Network("counts", bucket="250ms", partitions=2)
    rows = net.source("a", oracles.SCHEMA, time="ts").filter("i > -500000 or i is null")
    net.output("out", rows.count_window(3, by=["k"], slide=slide).agg(**aggregates))
    return net


def run(
    sessions: Sessions, folder: Path, rows: pa.Table, group: int, jobs: Jobs,
    change: Callable[[Compiled], None] = lambda compiled: None,
) -> tuple[pa.Table, int]:  # fmt: skip
    """The results, and the rows of the state at the end."""
    net = network(FOLDED)
    compiled = compile_network(net, sessions.small)
    change(compiled)
    ((path,),) = (fragment.paths for fragment in fragments(net))
    engine = Engine(net, sessions, str(folder), compiled=compiled, job_rows=LIMITS[jobs])
    files = Files(net, {"a": rows}, str(folder))
    buckets = sorted({file.bucket for file in files.files("a", -(1 << 60), 1 << 60)})
    version = engine.empty(path, buckets[0] - 1)
    tables = []
    for lo in range(buckets[0], buckets[-1] + 1, group):
        result = engine.run(path, version, lo, lo + group - 1, files)
        tables += [table for _, table in result.outputs["out"]]
        version = result.version
    return sort_canonical(pa.concat_tables(tables), "ts"), version.rows()


@pytest.mark.parametrize(("group", "jobs"), [(1, "small"), (3, "medium"), (50, "large")])
def test_partials_and_rows_as_state_give_the_same_bits(
    sessions: Sessions, tmp_path: Path, group: int, jobs: Jobs
) -> None:
    rows = oracles.rows_of(np.random.default_rng(5), 600, not_finite=0.05)
    wanted, kept_rows = run(
        sessions, tmp_path / "rows", rows, 50, "small", lambda compiled: compiled.totals.clear()
    )
    found, kept = run(sessions, tmp_path / "partials", rows, group, jobs)
    assert wanted.num_rows > 100
    assert digest(found) == digest(wanted)
    assert kept and kept_rows


@pytest.mark.parametrize("aggregates", ROWS_NEEDED)
def test_aggregates_that_arrow_cannot_merge_keep_rows(
    sessions: Sessions, aggregates: dict[str, Any]
) -> None:
    assert not compile_network(network(aggregates), sessions.small).totals


def test_only_windows_that_do_not_overlap_keep_partials(sessions: Sessions) -> None:
    for slide, kept in ((None, 1), (2, 0)):
        compiled = compile_network(network({"n": hf.count()}, slide), sessions.small)
        assert len(compiled.totals) == kept
