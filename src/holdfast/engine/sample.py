"""Random sample rows of any schema, for tests of user functions and for warm-up."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa


def sample_rows(schema: pa.Schema, rows: int, *, seed: int = 7) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table({field.name: _column(field.type, rows, rng) for field in schema}, schema=schema)


def _column(kind: pa.DataType, rows: int, rng: np.random.Generator) -> pa.Array:
    numbers = rng.integers(0, 100, rows)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.array(np.char.add("v", numbers.astype(str))).cast(kind)
    if pa.types.is_floating(kind):
        return pa.array(rng.random(rows) * 100).cast(kind)
    if pa.types.is_boolean(kind):
        return pa.array(numbers % 2 == 0)
    if pa.types.is_timestamp(kind):
        return pa.array(1_700_000_000_000_000 + numbers * 1_000, pa.int64()).cast(kind)
    if pa.types.is_date(kind):
        return pa.array((numbers + 19_000).astype(np.int32)).cast(kind)
    if pa.types.is_integer(kind):
        return pa.array(numbers, pa.int64()).cast(kind)
    if pa.types.is_decimal(kind):
        units = numbers % 10 ** min(kind.precision, 2)  # 99 would not fit decimal(1,0)
        return pa.array([Decimal(int(unit)).scaleb(-kind.scale) for unit in units], kind)
    return pa.nulls(rows, kind)
