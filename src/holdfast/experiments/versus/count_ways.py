"""Three ways to write count windows, for which Structured Streaming has no operator, in Python.

`applyInPandasWithState` and `transformWithStateInPandas` call a Python function for every key of a
batch. The third way is what an expert writes instead: `foreachBatch` computes all keys at once with
whole columns and keeps its state as a table. Each batch writes its state and its result as files
that are named by the batch number and renamed into place. A repeated batch reads the state of the
batch before it and replaces its own files, so the results are exactly-once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import SetupError
from holdfast.experiments.versus.streaming_side import Sink
from holdfast.experiments.versus.workload import COUNT_SIZE

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

WAYS = ("applyInPandasWithState", "transformWithStateInPandas", "foreachBatch")
_OUT = "src string, bytes bigint, last timestamp"


def check_protobuf() -> None:
    """`transformWithStateInPandas` talks to the state store with protobuf, which PySpark does not
    install."""
    try:
        import pyspark.sql.streaming.proto.StateMessage_pb2  # noqa: F401
    except Exception as err:
        raise SetupError(
            "transformWithStateInPandas needs the protobuf version of PySpark's generated code: "
            f"pip install 'holdfast[dev]' ({err})"
        ) from None


def way_of(name: str) -> tuple[Callable[[list[DataFrame]], DataFrame], Callable[[Path], Sink]]:
    """The query and the sink of a way."""
    from holdfast.experiments.versus.streaming_side import arrow_sink

    match name:
        case "applyInPandasWithState":
            return _apply_in_pandas, arrow_sink
        case "transformWithStateInPandas":
            check_protobuf()
            return _transform_with_state, arrow_sink
        case "foreachBatch":
            return (lambda sides: sides[0]), _columns_sink
    raise ValueError(f"no way named {name!r}")


# -- a function per key ----------------------------------------------------------------------------


def _fold(size: int) -> Any:
    """Function of a key's state and new rows, a closure, so that workers need not import this
    package. Returns early if no window is full, as in most calls."""

    def fold(
        n: int, total: int, parts: list[pd.DataFrame], src: str
    ) -> tuple[int, int, pd.DataFrame | None]:
        import numpy as np
        import pandas as pd

        frame = parts[0] if len(parts) == 1 else pd.concat(parts)
        value = frame["bytes"].to_numpy()
        if n + len(value) < size:
            return n + len(value), total + int(value.sum()), None
        order = np.argsort(frame["ts"].to_numpy(), kind="stable")
        ends = np.arange(size - n, len(value) + 1, size)
        running = total + np.cumsum(value[order])
        full = np.diff(running[ends - 1], prepend=0)
        last = frame["ts"].iloc[order[ends - 1]].to_numpy()
        rest = int(running[-1] - running[ends[-1] - 1])
        out = pd.DataFrame({"src": src, "bytes": full, "last": last})
        return len(value) - int(ends[-1]), rest, out

    return fold


def _apply_in_pandas(sides: list[DataFrame]) -> DataFrame:
    fold = _fold(COUNT_SIZE)

    def step(
        key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        before = state.get if state.exists else (0, 0)
        n, total, out = fold(before[0], before[1], list(frames), key[0])
        state.update((n, total))
        if out is not None:
            yield out

    return sides[0].groupBy("src").applyInPandasWithState(
        step, _OUT, "n int, bytes bigint", "append", "NoTimeout"
    )  # fmt: skip


def _transform_with_state(sides: list[DataFrame]) -> DataFrame:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

    fold = _fold(COUNT_SIZE)

    class Windows(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.open = handle.getValueState("open", "n int, bytes bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
            before = self.open.get() or (0, 0)
            n, total, out = fold(before[0], before[1], list(rows), key[0])
            self.open.update((n, total))
            if out is not None:
                yield out

        def close(self) -> None:
            pass

    return sides[0].groupBy("src").transformWithStateInPandas(
        Windows(), outputStructType=_OUT, outputMode="Append", timeMode="None"
    )  # fmt: skip


# -- whole columns ---------------------------------------------------------------------------------


def fold_columns(state: pa.Table, rows: pa.Table, size: int) -> tuple[pa.Table, pa.Table]:
    """Count windows of all keys at once. `state`: rows of the open window and their sum by key.
    Returns the results and the new state."""
    src = pa.concat_arrays(
        [*state["src"].chunks, *(chunk.cast(pa.string()) for chunk in rows["src"].chunks)]
    ).dictionary_encode()
    codes, names = src.indices.to_numpy(zero_copy_only=False), src.dictionary
    held = state.num_rows
    keys = len(names)
    open_n, open_sum = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    open_n[codes[:held]] = state["n"].to_numpy()
    open_sum[codes[:held]] = state["bytes"].to_numpy()
    new = codes[held:]
    ts = rows["ts"].cast(pa.int64()).to_numpy()
    order = np.lexsort((ts, new))
    key, ts, value = new[order], ts[order], rows["bytes"].to_numpy()[order]
    counts = np.bincount(key, minlength=keys)
    start = np.concatenate(([0], np.cumsum(counts)[:-1]))
    position = np.arange(len(key)) - start[key] + open_n[key]  # in the key's open window and on
    running = np.concatenate(([0], np.cumsum(value)))
    ends = np.flatnonzero(position % size == size - 1)
    window_key = key[ends]
    from_row = np.maximum(ends - size + 1, start[window_key])
    in_first = position[ends] == size - 1  # this window also holds the rows of the state
    sums = running[ends + 1] - running[from_row] + np.where(in_first, open_sum[window_key], 0)
    rest = (open_n + counts) % size
    full = open_n + counts >= size
    stop = start + counts
    tail = running[stop] - running[np.where(full, stop - rest, start)]
    open_sum = np.where(full, tail, open_sum + tail)
    some = np.flatnonzero(rest > 0)
    out = pa.table(
        {
            "src": names.take(pa.array(window_key)),
            "bytes": sums,
            "last": pa.array(ts[ends]).cast(pa.timestamp("us", tz="UTC")),
        }
    )
    after = pa.table({"src": names.take(pa.array(some)), "n": rest[some], "bytes": open_sum[some]})
    return out, after


_NO_STATE = pa.table(
    {"src": pa.array([], pa.string()), "n": np.zeros(0, np.int64), "bytes": np.zeros(0, np.int64)}
)


def _columns_sink(out: Path) -> Sink:
    states = out.parent / "state"
    states.mkdir()
    #: The newest state, so that it is read from its file only after a restart.
    newest: dict[int, pa.Table] = {}

    def put(table: pa.Table, folder: Path, number: int) -> None:
        pq.write_table(table, folder / f".{number}", compression="lz4")
        os.replace(folder / f".{number}", folder / f"batch-{number:06d}.parquet")

    def write(batch: DataFrame, number: int) -> bool:
        before = newest.get(number - 1)
        if before is None:
            file = states / f"batch-{number - 1:06d}.parquet"
            before = pq.read_table(file) if file.exists() else _NO_STATE
        result, after = fold_columns(before, batch.toArrow(), COUNT_SIZE)
        put(after, states, number)
        put(result, out, number)
        newest.clear()
        newest[number] = after
        (states / f"batch-{number - 2:06d}.parquet").unlink(missing_ok=True)
        return bool(result.num_rows)

    return write
