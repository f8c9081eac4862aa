"""The reliability levels of ECOC section 2.5.

The levels compare a real stream with an ideal stream, the output of a system without loss and
delay. An element of a stream has a sequence number, a payload and an instant. A real element is
correct (DS_c) if its number and payload equal those of an ideal element; every other real element
is false (DS_f). Each ideal element makes only its first arrival correct. A later arrival is a
*duplicate*, and a duplicate is false.

The levels cover loss, delay and order:

    loss    LILO(LF, EF)  at least the share LF of the ideal elements arrived, with false elements
                          of at most the share EF
            LOLE          all ideal elements arrived, and nothing else: LILO(1, 0)
    delay   LIDE(delta)   every correct element arrived 0 to delta after its ideal instant
            DEFR          every correct element arrived at its ideal instant: LIDE(0)
    order   IASO          the correct elements of a stream arrived in the order of their numbers
            IESO          any two elements of all streams arrived in their ideal order, or at the
                          same instant if their ideal instants are equal

Loss, delay and order are independent of each other, with two exceptions: DEFR implies IASO and
IESO, and IESO implies IASO. Both hold only if the ideal streams are in order, so an ideal stream
out of order is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import InputError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: Sequence number, payload and instant (microseconds) of one element of a stream.
Element = tuple[int, Hashable, int]


@dataclass(frozen=True, slots=True, eq=False)
class Matched:
    """A real stream matched with its ideal stream. The columns hold the correct elements, sorted by
    number. Elements with the same number, such as the rows of a bucket, have no order."""

    #: |DS_i| and |DS_f|.
    ideal_rows: int
    false_rows: int
    seq: Ints
    #: Instants of the elements in the ideal stream; never decreases.
    ideal_at_us: Ints
    #: Instants at which the elements arrived.
    at_us: Ints

    def __post_init__(self) -> None:
        count = len(self.seq)
        if not count == len(self.ideal_at_us) == len(self.at_us):
            raise InputError("a matched stream: expected columns of equal length")
        if count > self.ideal_rows:
            raise InputError(
                f"found {count} correct elements, but only {self.ideal_rows} ideal ones"
            )
        _demand_order(self.seq, self.ideal_at_us)


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels reached. For several streams, loss and delay are the worst over all streams: a
    level holds only if it holds for every stream."""

    #: The largest LF and the smallest EF for which LILO holds.
    loss_factor: float
    error_factor: float
    #: 1 - LF, as a separate field because 1.0 - 0.7 is not 0.3 in floating point.
    loss_share: float
    #: The smallest delta for which LIDE holds; None: an element arrived before its ideal instant.
    delay_us_max: int | None
    iaso: bool
    #: True only if elements with equal ideal instants also arrived at equal instants, as the paper
    #: demands. Rarely true across streams, because real deliveries hardly ever share an instant.
    ieso: bool
    #: Number of elements, over all streams, that arrived before an element with a strictly earlier
    #: ideal instant. Elements with equal ideal instants may arrive in any order, and elements with
    #: different ones may arrive at the same instant. Contracts with `order="inter"` demand 0.
    inversions: int

    @property
    def lole(self) -> bool:
        return self.loss_share == 0.0 and self.error_factor == 0.0

    def lilo(self, loss_factor: float, error_factor: float) -> bool:
        """|DS_c| >= |DS_i| * LF and |DS_f| <= |DS_i| * EF. Both sides are divided by |DS_i|: so
        9 elements of 10 satisfy LF = 0.9 regardless of the rounding of 10 * 0.9."""
        if not 0.0 < loss_factor <= 1.0 or not 0.0 <= error_factor < np.inf:
            raise InputError(
                f"LILO({loss_factor}, {error_factor}): expected LF in (0, 1] and EF in [0, inf)"
            )
        return self.loss_factor >= loss_factor and self.error_factor <= error_factor

    @property
    def defr(self) -> bool:
        return self.delay_us_max == 0

    def lide(self, delta_us: int) -> bool:
        if delta_us < 0:
            raise InputError(f"LIDE({delta_us}): expected a delay of at least 0")
        return self.delay_us_max is not None and self.delay_us_max <= delta_us


def evaluate(streams: Mapping[str, Matched]) -> Levels:
    """The levels that hold for all given output streams together."""
    all_streams = streams.values()
    empty = np.empty(0, np.int64)
    ideal_at_us = np.concatenate([empty, *(stream.ideal_at_us for stream in all_streams)])
    at_us = np.concatenate([empty, *(stream.at_us for stream in all_streams)])
    delays_us = at_us - ideal_at_us
    return Levels(
        loss_factor=min(
            (len(s.seq) / s.ideal_rows for s in all_streams if s.ideal_rows), default=1.0
        ),
        error_factor=max((_share(s.false_rows, s.ideal_rows) for s in all_streams), default=0.0),
        loss_share=max(
            (_share(s.ideal_rows - len(s.seq), s.ideal_rows) for s in all_streams), default=0.0
        ),
        delay_us_max=None if (delays_us < 0).any() else int(delays_us.max(initial=0)),
        iaso=all(_in_order(stream) for stream in all_streams),
        ieso=_isomorphic(ideal_at_us, at_us),
        inversions=int(came_too_early(ideal_at_us, at_us).sum()),
    )


def came_too_early(ideal_at_us: Ints, at_us: Ints) -> Bools:
    """Marks the elements that arrived before an element with a strictly earlier ideal instant."""
    order = np.argsort(ideal_at_us, kind="stable")
    ideal, real = ideal_at_us[order], at_us[order]
    strictly_before = np.searchsorted(ideal, ideal, side="left")
    last = np.r_[np.iinfo(np.int64).min, np.maximum.accumulate(real)][strictly_before]
    early = np.empty(len(order), np.bool_)
    early[order] = real < last
    return early


def match(ideal: Sequence[Element], real: Sequence[Element]) -> Matched:
    """Match a small stream with its ideal stream. Both are multisets: of equal elements, the first
    arrivals are correct and the surplus is false."""
    ideal = sorted(ideal, key=lambda element: (element[0], element[2]))
    _demand_order(_column([seq for seq, _, _ in ideal]), _column([at for _, _, at in ideal]))
    arrivals: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for seq, payload, at_us in sorted(real, key=lambda element: -element[2]):
        arrivals[seq, payload].append(at_us)
    correct = [
        (seq, ideal_at_us, instants.pop())
        for seq, payload, ideal_at_us in ideal
        if (instants := arrivals[seq, payload])
    ]
    seqs, ideal_at, at = zip(*correct, strict=True) if correct else ((), (), ())
    false_rows = len(real) - len(correct)
    return Matched(len(ideal), false_rows, _column(seqs), _column(ideal_at), _column(at))


def _column(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _demand_order(seq: Ints, ideal_at_us: Ints) -> None:
    if (seq[1:] < seq[:-1]).any():
        raise InputError("expected the elements of a stream to be sorted by their numbers")
    if (ideal_at_us[1:] < ideal_at_us[:-1]).any():
        raise InputError(
            "an ideal stream is not in order: the instant of an element is before that of its "
            "predecessor"
        )


def _share(rows: int, of: int) -> float:
    if not rows:
        return 0.0
    return rows / of if of else float("inf")


def _in_order(stream: Matched) -> bool:
    """IASO. A lost element is skipped: the next element that arrived is the successor."""
    at_us = stream.at_us[np.lexsort((stream.at_us, stream.seq))]
    return not (at_us[1:] < at_us[:-1]).any()


def _isomorphic(ideal_at_us: Ints, at_us: Ints) -> bool:
    """IESO: the real order of any two elements equals their ideal order. If this holds for all
    neighbours in sorted order, it holds for any two elements."""
    order = np.lexsort((at_us, ideal_at_us))
    steps, ideal_steps = np.diff(at_us[order]), np.diff(ideal_at_us[order])
    return bool(((steps >= 0) & ((steps > 0) == (ideal_steps > 0))).all())
