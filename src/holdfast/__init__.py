"""Holdfast: fault-tolerant continuous queries on Spark."""

from holdfast.config import Options
from holdfast.edge.feeds import Generate, ReadStream, Replay
from holdfast.edge.sinks import CorrectedTable, ParquetSink
from holdfast.errors import HoldfastError, NetworkError, NodeFailed
from holdfast.model.aggregates import (
    approx_distinct,
    avg,
    count,
    first,
    last,
    max,
    min,
    quantile,
    stddev,
    sum,
    top_k,
)
from holdfast.model.contract import Contract
from holdfast.model.network import Network, Stream
from holdfast.model.protection import Protection
from holdfast.runtime.running import Run, run

__version__ = "0.1.0"

__all__ = [
    "Contract", "CorrectedTable", "Generate", "HoldfastError", "Network", "NetworkError",
    "NodeFailed", "Options", "ParquetSink", "Protection", "ReadStream", "Replay", "Run", "Stream",
    "approx_distinct", "avg", "count", "first", "last", "max", "min", "quantile", "run", "stddev",
    "sum", "top_k",
]  # fmt: skip
