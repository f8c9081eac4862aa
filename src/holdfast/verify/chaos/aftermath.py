"""Input rows and ideal results of a finished chaos scenario.

The input is read from the logs of the sources. The ideal is computed from it in one batch, with the
code of the audit.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.edge.client import RECEIVED_AT
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema, schema_ddl
from holdfast.runtime.folders import client_folder, source_folder
from holdfast.storage import read_only
from holdfast.storage.rows import times_us
from holdfast.verify.chaos.recorder import rows_of
from holdfast.verify.history import Ideal, Logged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Aftermath:
    """Logged input and ideal output of one run, cached from one scenario to the next."""

    def __init__(self, network: Network, storage: str, spark: SparkSession) -> None:
        self._network, self._storage, self._spark = network, storage, spark
        #: Rows of each source by bucket, up to the last bucket that was read.
        self._rows: dict[str, dict[int, pa.Table]] = {op.name: {} for op in network.sources}

    def logged(self, at: int, first: int, upto: int) -> list[Logged]:
        events = []
        for name, rows in self._rows.items():
            self._read(name, upto)
            events += [
                Logged(at, name, bucket, rows_of(table))
                for bucket, table in rows.items()
                if first <= bucket <= upto
            ]
        return events

    def ideal(self, first: int, upto: int) -> list[Ideal]:
        """Return the ideal rows of buckets `first` to `upto`.

        The batch starts at the first row of the run, because windows and totals depend on rows
        before `first`.
        """
        from holdfast.verify.audit.ideal import Batch, batch_session

        network, session = self._network, batch_session(self._spark)
        events = []
        with tempfile.TemporaryDirectory(prefix="holdfast-chaos-") as scratch:
            frames = {}
            for op in network.sources:
                schema = arrow_schema(op.schema)
                self._read(op.name, upto)
                path = os.path.join(scratch, f"{op.name}.parquet")
                tables = [table.cast(schema) for table in self._rows[op.name].values()]
                pq.write_table(pa.concat_tables([schema.empty_table(), *tables]), path)
                frames[op.name] = session.read.schema(schema_ddl(schema)).parquet(path)
            batch = Batch(network, frames, session, upto=upto, scratch=scratch)
            for output in network.outputs:
                ideal, width_us = batch.output(output.name), network.width_us
                table = ideal.collect(
                    self._schema(output.name), first * width_us, (upto + 1) * width_us
                )
                buckets = pa.array(times_us(table, ideal.time) // width_us)
                for bucket in pc.unique(buckets).to_pylist():
                    rows = rows_of(table.filter(pc.equal(buckets, bucket)))
                    events.append(Ideal((bucket + 1) * width_us, output.name, bucket, rows))
        return events

    def _read(self, source: str, upto: int) -> None:
        """Read the buckets that are not cached yet. Closed buckets never change."""
        log, rows = read_only(source_folder(self._storage, source)), self._rows[source]
        for segment in log.state.streams[source].between(max(rows, default=-(2**62)) + 1, upto):
            table, bucket = log.read(segment), segment.id.bucket
            rows[bucket] = pa.concat_tables([rows[bucket], table]) if bucket in rows else table

    def _schema(self, output: str) -> pa.Schema:
        """Return the schema of the received rows, without the column added by the client."""
        log = read_only(client_folder(self._storage, output))
        schema = arrow_schema(log.state.streams[output].schema)
        return pa.schema([field for field in schema if field.name != RECEIVED_AT])
