"""What an output promises (ARCHITECTURE.md; ECOC section 2.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config import duration_us
from holdfast.errors import InputError

Order = Literal["none", "intra", "inter"]


@dataclass(frozen=True, slots=True)
class Contract:
    """Delay, loss and order a reader may count on."""

    #: Longest time from a row's stamp at the source to its result at the client.
    within: str | None = None
    #: Share of the ideal rows that may be missing (ECOC: 1 - LF) ...
    loss: float = 0.0
    #: ... and share of wrong rows, relative to the ideal ones (ECOC: EF).
    error: float = 0.0
    #: `intra`: in stream order (IASO); `inter`: also across outputs (IESO).
    order: Order = "intra"

    def __post_init__(self) -> None:
        if self.within is not None:
            duration_us(self.within, of="contract within")
        if not 0.0 <= self.loss < 1.0:
            raise InputError(f"contract loss={self.loss}: must be at least 0 and below 1")
        if self.error < 0.0:
            raise InputError(f"contract error={self.error}: must be at least 0")
        if self.order not in ("none", "intra", "inter"):
            raise InputError(f"contract order={self.order!r}: one of 'none', 'intra', 'inter'")

    @property
    def within_us(self) -> int | None:
        return None if self.within is None else duration_us(self.within)
