"""Runs a case as a deployment: sources, logs, nodes and clients, in one or several processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from holdfast.config import Options
from holdfast.model.loading import load
from holdfast.model.network import Network
from holdfast.runtime.running import Deployment, Run
from holdfast.storage.rows import times_us


def run_deployed(
    program: str,
    tables: Mapping[str, pa.Table],
    *,
    deployment: Deployment,
    extra_buckets: int,
    options: Options | None = None,
) -> dict[str, pa.Table]:
    """Every output as one table. `program`: the text of the application."""
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as folder:
        app = os.path.join(folder, f"{os.path.basename(folder).replace('-', '_')}.py")
        with open(app, "w") as file:
            file.write(program)
        network = load(app)
        storage = os.path.join(folder, "storage")
        run = Run(network, storage=storage, deployment=deployment, options=options, app=app)
        with run:
            _push(run, network, tables, extra_buckets)
            outputs = {}
            for op in network.outputs:
                client = run.client(op.name)
                parts = [rows for rows, _ in client]
                outputs[op.name] = pa.concat_tables(parts) if parts else None
        return {name: table for name, table in outputs.items() if table is not None}


def _push(run: Run, network: Network, tables: Mapping[str, pa.Table], extra_buckets: int) -> None:
    """Push the rows bucket by bucket, and close the buckets until no result is open."""
    width_us = network.width_us
    buckets = {op.name: times_us(tables[op.name], op.time) // width_us for op in network.sources}
    present = np.concatenate(list(buckets.values()))
    first, last = int(present.min()), int(present.max())
    for bucket in range(first, last + 1):
        for name, of in buckets.items():
            rows = tables[name].filter(pa.array(np.equal(of, bucket)))
            if rows.num_rows:
                run.source(name).push(rows)
            run.source(name).advance((bucket + 1) * width_us)
    for op in network.sources:
        run.source(op.name).advance((last + 1 + extra_buckets) * width_us)
        run.source(op.name).end()
