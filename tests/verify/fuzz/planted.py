"""Bugs planted in the engine, one at a time, as changes of its text: the random networks must find
each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    #: Relative to the package.
    file: str
    old: str
    new: str


BUGS = [
    Bug(
        "the first bucket of an open window is forgotten",
        "engine/windows.py",
        "return needed_from_us(op, upto, width_us) // width_us",
        "return needed_from_us(op, upto, width_us) // width_us + 1",
    ),
    Bug(
        "no window ends after the last bucket with rows",
        "engine/windows.py",
        "(buckets[run] + 1) * width_us - 1 + op.size_us)",
        "(buckets[run] + 1) * width_us - 1)",
    ),
    Bug(
        "a pane misses the first window it belongs to",
        "engine/windows.py",
        "{slide - 1}L",
        "{slide}L",
    ),
    Bug(
        "a pane of a small job misses the first window it belongs to",
        "engine/windows.py",
        "-(-(start + length) // slide) * slide",
        "-(-(start + length + 1) // slide) * slide",
    ),
    Bug(
        "earlier rows of the left side of a join are not joined with new rows of the right side",
        "engine/joins.py",
        "if earlier[0] is not None and new[1] is not None:",
        "if False:",
    ),
    Bug(
        "the bound of a join is exclusive",
        "engine/compiled.py",
        "<= {op.within_us}L",
        "< {op.within_us}L",
    ),
    Bug(
        "a join reads no history",
        "engine/joins.py",
        "since = (self.lo * self.width_us - op.within_us) // self.width_us",
        "since = self.lo",
    ),
    Bug(
        "the history of a join is deleted one bucket too early",
        "engine/retained.py",
        "return ((self.hi + 1) * self.width_us - op.within_us) // self.width_us",
        "return ((self.hi + 1) * self.width_us - op.within_us) // self.width_us + 1",
    ),
    Bug(
        "a join that selects rows by key forgets those that are not folded yet",
        "engine/joins.py",
        "files += self._input_files(up, raw_from, self.lo - 1)",
        "files += self._input_files(up, raw_from, self.lo - 2)",
    ),
    Bug(
        "of the rows with one key, the history gives only the first",
        "engine/key_index.py",
        'count = np.searchsorted(self.hashes, wanted, side="right") - first',
        'count = np.minimum(np.searchsorted(self.hashes, wanted, side="right") - first, 1)',
    ),
    Bug(
        "counts of panes are not added",
        "engine/mergeable.py",
        '{f"{a}_n": ("count", "sum", "1")}',
        '{f"{a}_n": ("count", "max", "1")}',
    ),
    Bug(
        "first and last are exchanged",
        "engine/mergeable.py",
        '"min" if aggregate.kind == "first" else "max"',
        '"max" if aggregate.kind == "first" else "min"',
    ),
    Bug(
        "the least frequent values come first",
        "engine/mergeable.py",
        "-e.{a}_n as m",
        "e.{a}_n as m",
    ),
    Bug(
        "a sum that does not fit a long wraps around",
        "engine/mergeable.py",
        "between -2147483648L and 2147483647L",
        "between -4294967296L and 4294967295L",
    ),
    Bug(
        "a count window forgets the order of its rows",
        "engine/count_windows.py",
        "np.sort(order[stays])",
        "np.sort(order[stays])[::-1].copy()",
    ),
    Bug(
        "a count window forgets how many rows it has",
        "engine/count_windows.py",
        "rows[first] += open_n",
        "rows[first] += np.minimum(open_n, 1)",
    ),
    Bug(
        "timers never fire",
        "engine/keyed_operators.py",
        "for b in (by_rows, by_timer) if",
        "for b in (by_rows,) if",
    ),
    Bug(
        "timers of earlier steps are not read",
        "engine/keyed.py",
        "needed = distinct(needed, due_timers(root, shard.layers, schema, shard.timer[0], end_us))",
        "needed = distinct(needed)",
    ),
    Bug(
        "an older layer is taken for the newest",
        "engine/layers.py",
        "for layer in reversed(layers):",
        "for layer in layers:",
    ),
    Bug(
        "removed keys come back",
        "engine/layers.py",
        "gone = touched[~is_in(touched, np.sort(hashes))]",
        "gone = touched[:0]",
    ),
    Bug(
        "rows of a key are spread over all shards",
        "engine/recipe.py",
        "pmod(hash({quoted(*op.keys)}), {shards})",
        "pmod(hash(*), {shards})",
    ),
    Bug(
        "keys of other widths go to other partitions",
        "storage/rows.py",
        "column = _widest(_canonical(table.column(key).combine_chunks()))",
        "column = _canonical(table.column(key).combine_chunks())",
    ),
    Bug(
        "negative zero has its own bits",
        "storage/rows.py",
        "values = array.to_numpy(zero_copy_only=False) + 0.0",
        "values = array.to_numpy(zero_copy_only=False) * 1.0",
    ),
    Bug(
        "averages of decimals are rounded down",
        "engine/decimals.py",
        "2 * q.r >= {n}",
        "2 * q.r > 3 * {n}",
    ),
]
