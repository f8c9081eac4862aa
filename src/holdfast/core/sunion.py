"""SUnion (Borealis section 3.2): a bucket is whole when every input said that it is complete.

Only boundaries count: rows that have arrived prove nothing about rows that have not. The order
inside a bucket is the engine's canonical one, so here a bucket is just a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import ProtocolViolation

#: Stands for "every bucket there will ever be": the boundary of a stream that has ended.
FOREVER = 2**62


class SUnion:
    """Boundaries of the inputs of one path."""

    def __init__(self, inputs: Sequence[str]) -> None:
        assert inputs, "a path without inputs"
        #: Last whole bucket of each input; None until its log has been seen.
        self.complete_upto: dict[str, int | None] = dict.fromkeys(inputs)

    def boundary(self, stream: str, upto: int) -> None:
        known = self.complete_upto[stream]
        if known is not None and upto < known:
            raise ProtocolViolation(f"the boundary of {stream} went back from {known} to {upto}")
        self.complete_upto[stream] = upto

    def whole_upto(self) -> int | None:
        """Last bucket that is whole on every input; None while an input is unknown."""
        known = [upto for upto in self.complete_upto.values() if upto is not None]
        return min(known) if len(known) == len(self.complete_upto) else None

    def waiting_for(self) -> list[str]:
        """The inputs that hold up the next bucket, in order of their names."""
        unknown = sorted(stream for stream, upto in self.complete_upto.items() if upto is None)
        if unknown:
            return unknown
        whole = self.whole_upto()
        return sorted(stream for stream, upto in self.complete_upto.items() if upto == whole)
