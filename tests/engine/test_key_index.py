"""Rows of files are found by key; what is read is verified."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast.engine import joins, key_index
from holdfast.engine.key_index import GROUP_ROWS, KeyIndexes
from holdfast.engine.retained import FOLD_ROWS_MAX, KEYED_ROWS_MAX, piece, to_merge
from holdfast.engine.state import Chunk, write_rows
from holdfast.engine.step_inputs import PANE_FILES
from holdfast.errors import LogCorrupted
from holdfast.storage.rows import digest, key_hashes

KEYS = ("k", "s")


def rows_of(count: int, seed: int = 1, keys: int = 1_000) -> pa.Table:
    rng = np.random.default_rng(seed)
    k = rng.integers(0, keys, count)
    names = np.array(["a", "b", None], object)[rng.integers(0, 3, count)]
    return pa.table({"k": k, "s": pa.array(names, pa.string()), "n": np.arange(count)})


def hashes_of(rows: pa.Table) -> key_index.U64:
    return np.unique(key_hashes(rows, KEYS))


def expected(rows: pa.Table, wanted: key_index.U64) -> pa.Table:
    return rows.filter(pa.array(np.isin(key_hashes(rows, KEYS), wanted)))


@pytest.mark.parametrize("count", [1, 50, GROUP_ROWS, GROUP_ROWS + 1, 3 * GROUP_ROWS + 7])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_rows_of_keys_are_found(tmp_path: Path, count: int, in_order: bool, seed: int) -> None:
    rows, file = rows_of(count, seed), str(tmp_path / "rows.parquet")
    writer = KeyIndexes()
    crc = writer.write(rows, KEYS, file) if in_order else write_rows(rows, file)
    wanted = hashes_of(rows_of(20, seed + 100, keys=2_000))
    right = expected(rows, wanted)
    for indexes in (writer, KeyIndexes()):  # with the hashes known, and with a file of others
        found = indexes.find(file, crc, KEYS, wanted)
        assert found.rows == right.num_rows and (found.bytes_read > 0) == (found.rows > 0)
        if found.rows:
            assert digest(found.read()) == digest(right)
        everything = indexes.find(file, crc, KEYS, hashes_of(rows))
        assert digest(everything.read()) == digest(rows)


@pytest.mark.parametrize("count", [GROUP_ROWS, GROUP_ROWS + 1, 3 * GROUP_ROWS + 7])
@pytest.mark.parametrize("key", [7, None])
def test_all_rows_may_have_the_same_key(tmp_path: Path, count: int, key: int | None) -> None:
    """Such a file is in the order of hashes, although its row group is too large."""
    rows = pa.table({"k": pa.array([key] * count, pa.int64()), "n": np.arange(count)})
    plain, sorted_by_key = str(tmp_path / "plain.parquet"), str(tmp_path / "sorted.parquet")
    wanted, indexes = np.unique(key_hashes(rows, ["k"])), KeyIndexes()
    written = {
        plain: write_rows(rows, plain), sorted_by_key: indexes.write(rows, ("k",), sorted_by_key)
    }  # fmt: skip
    for file, crc in written.items():
        for each in (indexes, KeyIndexes()):
            assert digest(each.find(file, crc, ("k",), wanted).read()) == digest(rows)


def test_null_keys_match_nothing() -> None:
    rows = pa.table({"k": pa.array([1, None, 2]), "s": pa.array(["a", "a", None])})
    assert joins._hashes(rows, KEYS).tolist() == key_hashes(rows.slice(0, 1), KEYS).tolist()


def test_a_damaged_row_group_is_noticed(tmp_path: Path) -> None:
    rows, file = rows_of(4 * GROUP_ROWS), tmp_path / "rows.parquet"
    indexes = KeyIndexes()
    crc = indexes.write(rows, KEYS, str(file))
    good = file.read_bytes()
    ends = indexes._index(str(file), crc, KEYS).groups
    for at in np.linspace(4, ends[-1].at + ends[-1].size - 1, 300).astype(int):
        damaged = bytearray(good)
        damaged[at] ^= 1 << int(at) % 8
        file.write_bytes(damaged)
        with pytest.raises(LogCorrupted, match="damaged"):
            indexes.find(str(file), crc, KEYS, hashes_of(rows)).read()
        with pytest.raises(LogCorrupted, match="damaged"):
            KeyIndexes().find(str(file), crc, KEYS, hashes_of(rows))
    file.write_bytes(good[: len(good) // 2])
    with pytest.raises(LogCorrupted):
        indexes.find(str(file), crc, KEYS, hashes_of(rows)).read()
    file.unlink()
    with pytest.raises(LogCorrupted, match="is missing"):
        indexes.find(str(file), crc, KEYS, hashes_of(rows)).read()


def test_damage_elsewhere_is_not_read(tmp_path: Path) -> None:
    rows, file = rows_of(8 * GROUP_ROWS), tmp_path / "rows.parquet"
    indexes = KeyIndexes()
    crc = indexes.write(rows, KEYS, str(file))
    wanted = hashes_of(rows.slice(0, 1))
    right = indexes.find(str(file), crc, KEYS, wanted).read()
    groups = indexes._index(str(file), crc, KEYS).groups
    data = bytearray(file.read_bytes())
    (read,) = {
        number
        for number, group in enumerate(groups)
        if crc32(data[group.at : group.at + group.size]) == group.crc
        and _has(indexes, str(file), crc, number, wanted)
    }
    other = groups[read - 1]
    data[other.at] ^= 1
    file.write_bytes(data)
    assert indexes.find(str(file), crc, KEYS, wanted).read().equals(right)


def _has(indexes: KeyIndexes, file: str, crc: int, number: int, wanted: key_index.U64) -> bool:
    places = indexes._index(file, crc, KEYS).places(wanted)
    return number in (places // GROUP_ROWS)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "BYTES_MAX", 20_000)
    indexes, crcs = KeyIndexes(), {}
    tables = {str(tmp_path / f"{number}.parquet"): rows_of(300, number) for number in range(9)}
    for file, rows in tables.items():
        crcs[file] = indexes.write(rows, KEYS, file)
    for file, rows in tables.items():
        found = indexes.find(file, crcs[file], KEYS, hashes_of(rows))
        assert pc.sum(found.read()["n"]) == pc.sum(rows["n"])
        assert sum(index.bytes for index in indexes._held.values()) <= 20_000
        assert 1 <= len(indexes._held) < 9


def chunk(number: int, level: int, rows: int) -> Chunk:
    return Chunk(f"{number}", number, number, rows, (number,), 0, level)


def test_many_rows_are_folded_in_pieces() -> None:
    few = dict.fromkeys(range(15), 10)
    assert piece(few, 16, 20) is None
    assert piece({**few, 17: 10}, 16, 20) == 20
    assert piece(dict.fromkeys(range(16), KEYED_ROWS_MAX // 4), 16, 20) == 3
    assert piece(dict.fromkeys(range(16), KEYED_ROWS_MAX // 3), 16, 20) is None
    assert piece({0: KEYED_ROWS_MAX + 1, **{b + 1: 10 for b in few}}, 16, 20) == 0
    assert piece({0: FOLD_ROWS_MAX + 1, **{b + 1: 10 for b in few}}, 16, 20) is None


def test_sixteen_chunks_of_a_level_become_one() -> None:
    few = [chunk(number, 1, 10) for number in range(PANE_FILES - 1)]
    assert to_merge(few) is None
    assert to_merge([*few, chunk(99, 1, 10)]) == (0, PANE_FILES)
    older = [chunk(-2, 3, 10), chunk(-1, 2, 10)]
    assert to_merge([*older, *few, chunk(99, 1, 10)]) == (2, 2 + PANE_FILES)
    assert to_merge([*older, *few, chunk(99, 0, 10)]) is None


def test_merged_files_are_not_too_large() -> None:
    half = KEYED_ROWS_MAX // 2
    large = [chunk(number, 1, half + 1) for number in range(40)]
    assert to_merge(large) is None
    medium = [chunk(number, 1, half // 2) for number in range(PANE_FILES)]
    assert to_merge(medium) == (0, 4)
    assert to_merge([chunk(-1, 1, half + 1), chunk(0, 1, half), *medium]) == (1, 4)


@pytest.mark.parametrize("rows", [1, 500, 8_000, 30_000, 200_000])
def test_a_long_history_has_few_files_and_rows_are_merged_rarely(rows: int) -> None:
    chunks: list[Chunk] = []
    written = 0
    total = min(3_000, 100 * KEYED_ROWS_MAX // rows)
    for number in range(total):
        chunks.append(chunk(number, 1, rows))
        while (found := to_merge(chunks)) is not None:
            first, end = found
            merged = sum(c.rows for c in chunks[first:end])
            assert merged <= KEYED_ROWS_MAX
            written += merged
            level = chunks[first].level + 1
            chunks[first:end] = [
                Chunk("", chunks[first].lo, chunks[end - 1].hi, merged, level=level)
            ]
    assert [c.lo for c in chunks] == sorted(c.lo for c in chunks)
    assert all(one.hi + 1 == other.lo for one, other in pairwise(chunks))
    assert len(chunks) <= 2 * total * rows // KEYED_ROWS_MAX + 4 * PANE_FILES
    assert written <= 4 * total * rows
