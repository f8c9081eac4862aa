"""Holdfast: fault-tolerant continuous queries on Spark."""

from holdfast.config import Options
from holdfast.errors import HoldfastError, NetworkError
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

__version__ = "0.1.0"

__all__ = [
    "Contract", "HoldfastError", "Network", "NetworkError", "Options", "Stream", "approx_distinct",
    "avg", "count", "first", "last", "max", "min", "quantile", "stddev", "sum", "top_k",
]  # fmt: skip
