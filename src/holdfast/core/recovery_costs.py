"""How long a recovery would take, from costs that the node measures itself. Pure.

Recovery (`eventual_checkpoint.py`) reads the entries that the newest record names, replays the
input rows since then, and has fixed costs: it opens the log, plans its first jobs, and runs the
next bucket. A replay is one step or several, each of which takes about as long as the next bucket.
The paper (section III.A) leaves the calibration of such a formula open. Here every recovery is
measured and corrects the costs, which are logged with each record. Before the first recovery, the
cost of a row follows from normal steps, whose rows are fewer, so that each costs more: the
prediction is then too long rather than too short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

#: Costs before anything was measured.
_ENTRY_US, _ROW_US, _FIXED_US = 5.0, 2.0, 1_000_000.0
#: Weight of a new measurement among the earlier ones, at least.
_WEIGHT = 0.3
#: The same for a step among many.
_STEP_WEIGHT = 0.1
#: The same for the rows and entries of a recovery.
_COUNT_MIN = 10_000
#: Shortest time for a row or an entry that is assumed, so that their number stays limited.
_EACH_US_MIN = 0.05


@dataclass(slots=True)
class RecoveryCosts:
    #: To read an entry, to replay a row, and everything else.
    entry_us: float = _ENTRY_US
    row_us: float = _ROW_US
    fixed_us: float = _FIXED_US
    #: Number of recoveries that were measured.
    recoveries: int = 0
    #: To replay anything at all, however few rows.
    step_us: float = 0.0
    #: Number of recoveries that have replayed rows.
    replays: int = 0

    def predicted_us(self, entries: int, rows: int) -> float:
        return self.fixed_us + self.entry_us * entries + self.replay_us(rows)

    def replay_us(self, rows: int) -> float:
        return self.step_us + self.row_us * rows if rows else 0.0

    def stepped(self, rows: int, took_us: int) -> None:
        """A normal step was measured."""
        if self.replays == 0 and rows:
            self.row_us += _STEP_WEIGHT * (took_us / rows - self.row_us)

    def recovered(
        self,
        entries: int,
        rows: int,
        load_us: int,
        replay_us: int,
        all_us: int,
        next_us: int = 0,
        next_rows: int = 1,
    ) -> None:
        """A recovery was measured: the time to load the entries, to replay the rows, and in all,
        which contains that of the next bucket. A next bucket without rows does not show what one
        with rows costs."""
        self.recoveries += 1
        weight = max(_WEIGHT, 1 / self.recoveries)
        self.entry_us = _corrected(self.entry_us, entries, load_us, 0, weight)
        if next_rows:
            self.step_us += weight * (next_us - self.step_us)
        if rows:
            self.replays += 1
            weight_of_rows = max(_WEIGHT, 1 / self.replays)
            self.row_us = _corrected(self.row_us, rows, replay_us, next_us, weight_of_rows)
        replayed_us = self.replay_us(rows)
        if rows < _COUNT_MIN:  # their cost is uncertain, and must not hide the rest
            replayed_us = min(replayed_us, replay_us)
        rest_us = max(0.0, all_us - self.entry_us * entries - replayed_us)
        if next_rows or rest_us > self.fixed_us:
            self.fixed_us += weight * (rest_us - self.fixed_us)

    def body(self) -> tuple[float, ...]:
        return (
            round(self.entry_us, 3), round(self.row_us, 3), round(self.fixed_us), self.recoveries,
            round(self.step_us), self.replays,
        )  # fmt: skip

    @classmethod
    def of(cls, body: Sequence[float]) -> Self:
        """The costs that were logged; empty, or of another version: the assumed ones."""
        if len(body) != len(cls().body()):
            return cls()
        entry_us, row_us, fixed_us, recoveries, step_us, replays = body
        return cls(entry_us, row_us, fixed_us, int(recoveries), step_us, int(replays))


@dataclass(slots=True)
class Recovery:
    """The times of a recovery, until the first new bucket is committed. The time in which the node
    waits for its inputs, or for disk space, does not count."""

    #: The last bucket whose results were logged before.
    upto: int
    #: Entries that were read, and the time to read and to verify them.
    entries: int
    load_us: int
    #: The time to open the log and to read the state of other paths, a part of the fixed costs.
    opening_us: int
    #: Rows that were replayed, and the time for this.
    rows: int = 0
    replay_us: int = 0

    def replayed(self, rows: Mapping[int, int], took_us: int) -> None:
        """A step has replayed buckets. `rows`: by bucket."""
        self.replay_us += took_us
        self.rows += sum(rows.values())

    def finished(self, rows: Mapping[int, int], took_us: int, costs: RecoveryCosts) -> int:
        """The first new bucket is committed. `rows`: its rows. Corrects the costs and returns the
        time of the recovery."""
        all_us = self.opening_us + self.load_us + self.replay_us + took_us
        costs.recovered(
            self.entries, self.rows, self.load_us, self.replay_us, all_us, took_us,
            sum(rows.values()),
        )  # fmt: skip
        return all_us


def _corrected(each_us: float, count: int, took_us: int, other_us: int, weight: float) -> float:
    """The cost of each row or entry, after another measurement. `other_us`: about how much of the
    time is for something else. Few rows, or rows that take less than that, say only what each costs
    at most."""
    if count == 0:
        return each_us
    if count >= _COUNT_MIN and took_us > other_us:
        measured_us = max(_EACH_US_MIN, (took_us - other_us) / count)
        return each_us + weight * (measured_us - each_us)
    return min(each_us, max(_EACH_US_MIN, took_us / count))
