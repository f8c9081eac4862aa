"""The interface between the engine and its callers: inputs and results of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from holdfast.engine.state import Version
from holdfast.frozen import dataclass


@dataclass(frozen=True, slots=True)
class InputFile:
    bucket: int
    path: str
    rows: int
    #: CRC-32 of the file.
    crc: int


class Inputs(Protocol):
    """The input segments that a path may read."""

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]: ...


#: For each output stream, the buckets that have rows and their tables, in bucket order.
Results = dict[str, list[tuple[int, pa.Table]]]
#: Logs the results of a step before the step prepares the state for later ones.
OnResults = Callable[[Results], None]


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: Results
    version: Version
    #: Number of Spark jobs of the step; 0 if no result was due.
    jobs: int
