"""State versions and their files. No JVM."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.engine.state import (
    Chunk,
    Layer,
    Shard,
    Version,
    check_files,
    export_version,
    files_below,
    import_version,
    release,
    write_rows,
)
from holdfast.errors import InputError, LogCorrupted

TABLE = pa.table({"x": [1, 2, 3]})


def version(folder: Path, bucket: int, *files: str) -> Version:
    crcs = {name: write_rows(TABLE, str(folder / name)) for name in files}
    chunks = tuple(Chunk(n, bucket, bucket, 3, (bucket,), crcs[n]) for n in files[:-1])
    layer = Layer(files[-1], 3, 0, 1, 1, (7, 9), 5, crcs[files[-1]])
    return Version(
        "p", bucket, panes={"w": chunks},
        shards={"k": {0: Shard((layer,), 3, (7, -5))}},
        needs_from=bucket, plan="plan",
    )  # fmt: skip


def test_a_version_is_restored_from_the_manifest(tmp_path: Path) -> None:
    original = version(tmp_path, 5, "p/a.parquet", "p/b.parquet")
    assert Version.of("p", 5, original.body()) == original


@pytest.mark.parametrize("change", [{"panes": {"w": [["x"]]}}, {"shards": {"k": {"a": []}}}])
def test_state_of_another_holdfast_version_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """C14: fields are missing or have another format."""
    body = version(tmp_path, 5, "p/a.parquet", "p/b.parquet").body()
    for other in ({k: v for k, v in body.items() if k != "needs_from"}, body | change):
        with pytest.raises(LogCorrupted, match="start this storage with the version that wrote it"):
            Version.of("p", 5, other)


def test_recovery_reads_each_file_once() -> None:
    """The rows between two operators are in one file, also if a join reads them on both sides."""
    total = Chunk("total", 1, 1, 2)
    panes, both = Chunk("panes", 1, 1, 10, total=total), Chunk("both", 1, 1, 100)
    layers = tuple(Layer(f"{n}.layer", n, 0, 1, 0, None, 0, 0) for n in (1_000, 2_000))
    version = Version(
        "p", 1, panes={"w": (panes,)}, edges={"j:0": (both,), "j:1": (both,)},
        shards={"k": {0: Shard(layers, 1_500), 1: Shard()}},
    )  # fmt: skip
    assert set(version.sizes()) == set(version.files())
    assert version.entries() == 2 + 10 + 100 + 3_000
    assert version.keys() == 1_500


def test_release_deletes_files_of_versions_that_are_not_retained(tmp_path: Path) -> None:
    old = version(tmp_path, 1, "p/a.parquet", "p/step.1/shard.parquet")
    new = version(tmp_path, 2, "p/a.parquet", "p/step.2/shard.parquet")
    files = set(old.files()) | set(new.files())
    release(str(tmp_path), [new], files)
    assert files == files_below(str(tmp_path)) == set(new.files())
    assert not (tmp_path / "p" / "step.1").exists()


def test_recovery_deletes_files_of_killed_steps(tmp_path: Path) -> None:
    retained = version(tmp_path, 1, "p/a.parquet", "p/b.parquet")
    for orphan in ("p/half.parquet", "p.1234.tmp", "p/step.9/shard-0.parquet"):
        write_rows(TABLE, str(tmp_path / orphan))
    release(str(tmp_path), [retained], files_below(str(tmp_path)))
    assert files_below(str(tmp_path)) == set(retained.files())


def test_a_missing_or_changed_file_is_detected(tmp_path: Path) -> None:
    complete = version(tmp_path, 1, "p/a.parquet", "p/b.parquet")
    check_files(complete, str(tmp_path))
    write_rows(TABLE.slice(0, 1), str(tmp_path / "p/a.parquet"))
    with pytest.raises(LogCorrupted, match=r"a\.parquet is damaged: expected CRC-32"):
        check_files(complete, str(tmp_path))
    (tmp_path / "p/a.parquet").unlink()
    with pytest.raises(LogCorrupted, match=r"a\.parquet is missing"):
        check_files(complete, str(tmp_path))


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    """C3: the footer and the page headers of a Parquet file have no checksums of their own."""
    complete = version(tmp_path, 1, "p/a.parquet", "p/b.parquet")
    path = tmp_path / "p/b.parquet"
    data = path.read_bytes()
    for place in range(0, 8 * len(data), 7):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(LogCorrupted, match=r"b\.parquet is damaged"):
            check_files(complete, str(tmp_path))


def test_state_of_another_query_is_refused(tmp_path: Path) -> None:
    original = version(tmp_path / "here", 1, "p/a.parquet", "p/b.parquet")
    exported = export_version(original, str(tmp_path / "here"), str(tmp_path / "moved"))
    moved, target = str(tmp_path / "moved"), str(tmp_path / "there")
    with pytest.raises(InputError, match="another query"):
        import_version(exported, moved, target, "other plan")
    assert import_version(exported, moved, target, "plan") == original
    check_files(original, target)
