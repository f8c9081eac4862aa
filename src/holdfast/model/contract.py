"""The contract of an output: delay, loss, errors and order (ARCHITECTURE.md; ECOC section 2.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config import duration_us
from holdfast.errors import InputError

Order = Literal["none", "intra", "inter"]


@dataclass(frozen=True, slots=True)
class Contract:
    """The guarantees that clients of an output can rely on."""

    #: Longest delay from the time column of a row to its result at the client; None: no limit.
    within: str | None = None
    #: Largest share of the ideal rows that may be missing (ECOC: 1 - LF).
    loss: float = 0.0
    #: Largest number of wrong rows, relative to the number of ideal rows (ECOC: EF).
    error: float = 0.0
    #: `none`: any order; `intra`: in stream order (IASO); `inter`: also across outputs (IESO).
    order: Order = "intra"

    def __post_init__(self) -> None:
        if self.within is not None:
            duration_us(self.within, of="contract within")
        if not 0.0 <= self.loss < 1.0:
            raise InputError(f"contract loss={self.loss}: must be at least 0 and below 1")
        if self.error < 0.0:
            raise InputError(f"contract error={self.error}: must be at least 0")
        if self.order not in ("none", "intra", "inter"):
            raise InputError(f"contract order={self.order!r}: must be 'none', 'intra' or 'inter'")

    @property
    def within_us(self) -> int | None:
        return None if self.within is None else duration_us(self.within)
