"""What a step reads and gives: the values between the engine and those who call it."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from holdfast.engine.state import Version
from holdfast.frozen import dataclass


@dataclass(frozen=True, slots=True)
class InputFile:
    bucket: int
    path: str
    rows: int


class Inputs(Protocol):
    """Where a path finds the stable input segments it may read."""

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    #: For each output stream the tables of the buckets that have rows, in bucket order.
    outputs: dict[str, list[tuple[int, pa.Table]]]
    version: Version
    #: Spark jobs this step needed: buckets without results need none.
    jobs: int
