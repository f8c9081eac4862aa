"""Holdfast: fault-tolerant continuous queries on Spark.

Public names are imported at first use, so that a command can print messages and be interrupted
before Arrow is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.config import Options
    from holdfast.edge.feeds import Generate, ReadStream, Replay
    from holdfast.edge.sinks import CorrectedTable, ParquetSink
    from holdfast.errors import (
        HoldfastError,
        InputError,
        NetworkError,
        NodeFailed,
        RowsNotDurable,
        StorageFull,
    )
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
    from holdfast.runtime.launch import run
    from holdfast.runtime.running import Run

__version__ = "0.5.0.dev0"

__all__ = [
    "Contract", "CorrectedTable", "Generate", "HoldfastError", "InputError", "Network",
    "NetworkError", "NodeFailed", "Options", "ParquetSink", "Protection", "ReadStream", "Replay",
    "RowsNotDurable", "Run", "StorageFull", "Stream",
    "approx_distinct", "avg", "count", "first", "last", "max", "min", "quantile", "run", "stddev",
    "sum", "top_k",
]  # fmt: skip

#: Public names by module.
_MODULES = {
    "config": ("Options",),
    "edge.feeds": ("Generate", "ReadStream", "Replay"),
    "edge.sinks": ("CorrectedTable", "ParquetSink"),
    "errors": (
        "HoldfastError", "InputError", "NetworkError", "NodeFailed", "RowsNotDurable",
        "StorageFull",
    ),
    "model.aggregates": (
        "approx_distinct", "avg", "count", "first", "last", "max", "min", "quantile", "stddev",
        "sum", "top_k",
    ),
    "model.contract": ("Contract",),
    "model.network": ("Network", "Stream"),
    "model.protection": ("Protection",),
    "runtime.launch": ("run",),
    "runtime.running": ("Run",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"holdfast.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
