"""SOutput: the stable and the tentative line in a log (sections of Borealis). No JVM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import Any

import pyarrow as pa
import pytest

from holdfast.core.progress_events import Run, RunTentative
from holdfast.core.sunion import Partial
from holdfast.errors import NotDeterministic, ProtocolViolation, StorageFull
from holdfast.model.fragments import Path
from holdfast.storage import Boundary, Ended, Log, Tentative, Undo, digest, read_only
from holdfast.storage.manifest import HEADER, read_records
from holdfast.storage.records import decode
from holdfast.streams.soutput import SOutput
from holdfast.types import Segment, Stability
from holdfast.verify.sim.simulated_disk import MemoryDisk

PATH = Path("p", ("s1", "s2"), ("out", "side"), ())
SCHEMA = "ts timestamp, value bigint"
#: One of two inputs is present, with a quarter of the expected rows.
HALF = Partial(0.5, 0.25)
Buckets = list[tuple[int, pa.Table]]


def rows(bucket: int, *values: int) -> tuple[int, pa.Table]:
    times = pa.array([bucket * 1_000 + at for at in range(len(values))], pa.timestamp("us", "UTC"))
    return bucket, pa.table({"ts": times, "value": pa.array(values, pa.int64())})


def start(root: Folder | str, **options: Any) -> SOutput:
    """Like a node: opening the log discards the tentative buckets of its predecessor."""
    log = Log.open(root, "node", fsync="never", **options)
    soutput = SOutput(log, digest)
    soutput.valid_from["p"] = 0
    for output in PATH.outputs:
        log.open_stream(output, SCHEMA, "ts", 0)
    return soutput


@pytest.fixture
def soutput(tmp_path: Folder) -> Iterator[SOutput]:
    soutput = start(tmp_path)
    yield soutput
    soutput.log.close()


def stable(soutput: SOutput, lo: int, hi: int, *out: tuple[int, pa.Table], **options: Any) -> None:
    soutput.stable(Run("p", lo, hi, **options), PATH, {"out": list(out), "side": []})


def tentative(
    soutput: SOutput, lo: int, hi: int, *out: tuple[int, pa.Table], line: int = 1,
    side_upto: int | None = None, side: Buckets | None = None,
) -> None:  # fmt: skip
    outputs = (("out", hi), ("side", hi if side_upto is None else side_upto))
    run = RunTentative("p", line, lo, hi, outputs, missing=("s2",), partial=HALF)
    soutput.tentative(run, {"out": list(out), "side": side or []})


def values(soutput: SOutput, segments: list[Segment]) -> dict[int, list[int]]:
    return {s.id.bucket: soutput.log.read(s)["value"].to_pylist() for s in segments}


def given(soutput: SOutput, stream: str = "out") -> tuple[dict[int, list[int]], ...]:
    """The stable and the tentative values, by bucket."""
    log = soutput.log
    return (
        values(soutput, log.segments(stream, 0, 99)),
        values(soutput, log.tentative(stream)[0]),
    )


def span(since: int, upto: int) -> Tentative:
    return Tentative("out", since, upto, ("s2",), *HALF)


def files(root: Folder) -> list[str]:
    return sorted(path.name.split(".p0")[0] for path in (root / "segments").rglob("*.parquet"))


def story(root: Folder, *kinds: type) -> list[Any]:
    manifest = root / "manifest"
    records = read_records(manifest.read_bytes(), str(manifest))
    return [record for record in records if isinstance(record, kinds)]


def frames(root: Folder) -> Iterator[list[Any]]:
    """The records of the manifest, append by append."""
    data = (root / "manifest").read_bytes()
    offset = len(HEADER)
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "little")
        yield decode(data[offset + 8 : offset + 8 + length])
        offset += 8 + length


# -- section 3.4.2: stabilizing output streams ----------------------------------------------------


def test_3_4_2_a_correction_replaces_tentative_buckets(soutput: SOutput, tmp_path: Folder) -> None:
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    soutput.lines["p"] = 1
    tentative(soutput, 2, 2, rows(2, 30))
    tentative(soutput, 3, 4, rows(3, 40), rows(4, 50))
    assert given(soutput) == ({0: [1], 1: [2]}, {2: [30], 3: [40], 4: [50]})
    assert soutput.log.tentative("out")[1] == [span(2, 4)], "with the missing inputs and the shares"

    stable(soutput, 2, 4, rows(2, 3), rows(3, 4), rows(4, 5))
    assert given(soutput) == ({0: [1], 1: [2], 2: [3], 3: [4], 4: [5]}, {})
    info = soutput.log.info("out")
    assert (info.complete_upto, info.tentative_upto, info.undos) == (4, None, 0)
    assert story(tmp_path, Undo) == []


def test_3_4_2_one_append_publishes_the_correction_and_removes_the_tentative_bucket(
    soutput: SOutput, tmp_path: Folder
) -> None:
    """A consumer sees one of them at any time, never both and never neither."""
    soutput.lines["p"] = 1
    tentative(soutput, 0, 1, rows(0, 9), rows(1, 9))
    stable(soutput, 0, 0, rows(0, 1))
    last = list(frames(tmp_path))[-1]
    assert [type(record).__name__ for record in last] == ["Added", "Boundary", "Boundary"]
    assert {record.upto for record in last if isinstance(record, Boundary)} == {0}


def test_3_4_2_a_partial_correction_keeps_later_tentative_buckets(
    soutput: SOutput, tmp_path: Folder
) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 3, rows(0, 9), rows(2, 9), rows(3, 9))
    stable(soutput, 0, 1, rows(0, 1))
    assert given(soutput) == ({0: [1]}, {2: [9], 3: [9]})
    assert soutput.log.tentative("out")[1] == [span(2, 3)]
    stable(soutput, 2, 3, rows(3, 2))
    assert given(soutput) == ({0: [1], 3: [2]}, {}), "bucket 2 is empty now"
    assert story(tmp_path, Undo) == []


def test_a_correction_has_a_higher_version_than_the_tentative_segment_it_replaces(
    soutput: SOutput,
) -> None:
    log = soutput.log
    stable(soutput, 0, 0, rows(0, 1))
    for line, bucket in ((1, 1), (2, 2)):
        soutput.lines["p"] = line
        tentative(soutput, bucket, bucket, rows(bucket, 2), line=line)
        tentative_id = log.tentative("out")[0][0].id
        stable(soutput, bucket, bucket, rows(bucket, 3))
        correction = log.segments("out", bucket, bucket)[0].id
        assert tentative_id.bucket == correction.bucket == bucket
        assert tentative_id.version < correction.version
        soutput.leave(PATH)


def test_a_correction_differs_in_identity_from_a_tentative_segment_written_concurrently(
    soutput: SOutput,
) -> None:
    soutput.lines["p"] = 1

    def beside() -> Iterator[tuple[int, pa.Table]]:
        yield rows(0, 1)
        tentative(soutput, 0, 0, rows(0, 9))  # the last, slow run of the tentative line
        tentative_ids.extend(segment.id for segment in soutput.log.tentative("out")[0])

    tentative_ids: list[object] = []
    soutput.stable(Run("p", 0, 0), PATH, {"out": beside(), "side": []})  # type: ignore[dict-item]
    assert given(soutput) == ({0: [1]}, {})
    assert soutput.log.segments("out", 0, 0)[0].id not in tentative_ids


def test_tentative_buckets_after_a_correction_remain_valid_and_the_line_continues(
    soutput: SOutput,
) -> None:
    """The tentative line is ahead of the stable line."""
    soutput.lines["p"] = 1
    tentative(soutput, 0, 2, rows(0, 9), rows(2, 9))
    stable(soutput, 0, 0, rows(0, 1))
    assert given(soutput) == ({0: [1]}, {2: [9]})
    tentative(soutput, 3, 3, rows(3, 9))
    info, (_, spans) = soutput.log.info("out"), soutput.log.tentative("out")
    assert info.tentative_upto == 3
    assert spans == [span(1, 3)]


def test_an_output_without_tentative_buckets_has_nothing_to_replace(soutput: SOutput) -> None:
    """The output `side` was blocked."""
    stable(soutput, 0, 1, rows(0, 1))
    soutput.lines["p"] = 1
    tentative(soutput, 2, 5, rows(5, 9), side_upto=1)
    stable(soutput, 2, 5, rows(5, 2))
    assert given(soutput) == ({0: [1], 5: [2]}, {}) and given(soutput, "side") == ({}, {})
    assert soutput.log.info("side").complete_upto == 5


def test_property_4_stable_buckets_are_never_undone_and_recomputing_changes_nothing(
    soutput: SOutput, tmp_path: Folder
) -> None:
    """Duplicate elimination: logged buckets are compared, not published again."""
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    before, names = given(soutput), files(tmp_path)
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    assert given(soutput) == before and files(tmp_path) == names
    assert story(tmp_path, Undo) == []
    stable(soutput, 1, 2, rows(1, 2), rows(2, 3))
    assert given(soutput)[0] == {0: [1], 1: [2], 2: [3]}
    with pytest.raises(ProtocolViolation, match="stable buckets are never undone"):
        soutput.log.append(Undo("out", 1, 1))


def test_3_2_recomputing_a_different_result_raises_not_deterministic(soutput: SOutput) -> None:
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    with pytest.raises(NotDeterministic, match="output 'out', bucket 1"):
        stable(soutput, 1, 2, rows(1, 7), rows(2, 3))
    assert given(soutput)[0] == {0: [1], 1: [2]}


def test_3_2_recomputing_a_bucket_without_its_rows_raises_not_deterministic(
    soutput: SOutput,
) -> None:
    """And a bucket that was logged without rows must stay empty."""
    stable(soutput, 0, 2, rows(0, 1), rows(1, 2))
    with pytest.raises(NotDeterministic, match="output 'out', bucket 1"):
        stable(soutput, 0, 3, rows(0, 1), rows(3, 3))
    with pytest.raises(NotDeterministic, match="output 'out', bucket 2"):
        stable(soutput, 0, 3, rows(0, 1), rows(1, 2), rows(2, 3))
    assert given(soutput)[0] == {0: [1], 1: [2]}


def test_a_replay_beyond_the_logged_end_writes_nothing(soutput: SOutput) -> None:
    stable(soutput, 0, 1, rows(0, 1))
    soutput.log.append(Ended("out"), Ended("side"))
    stable(soutput, 0, 4, rows(0, 1))
    assert given(soutput)[0] == {0: [1]} and soutput.log.info("out").complete_upto == 1
    with pytest.raises(NotDeterministic, match="output 'out', bucket 3"):
        stable(soutput, 0, 4, rows(0, 1), rows(3, 3))


def test_3_4_1_results_of_runs_that_rebuild_a_state_are_dropped(soutput: SOutput) -> None:
    """Undo/redo starts from an empty state, so its first results are not valid."""
    stable(soutput, 0, 3, rows(2, 1), rows(3, 2))
    soutput.lines["p"] = 1
    tentative(soutput, 4, 4, rows(4, 9))
    stable(soutput, 2, 4, rows(2, 77), rows(3, 78), rows(4, 3), rebuild_from=4)
    assert given(soutput) == ({2: [1], 3: [2], 4: [3]}, {})


def test_3_4_4_results_before_the_first_valid_bucket_are_not_published(
    soutput: SOutput,
) -> None:
    soutput.valid_from["p"] = 3
    soutput.lines["p"] = 1
    tentative(soutput, 0, 4, rows(2, 9), rows(3, 9))
    assert given(soutput)[1] == {3: [9]}
    stable(soutput, 0, 4, rows(2, 1), rows(3, 2))
    assert given(soutput)[0] == {3: [2]}


# -- what a tentative line may still publish ------------------------------------------------------


def test_tentative_buckets_that_the_stable_line_has_overtaken_are_dropped(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    stable(soutput, 0, 2, rows(1, 1))
    tentative(soutput, 0, 2, rows(0, 9), rows(2, 9))
    assert given(soutput) == ({1: [1]}, {})
    assert soutput.log.info("out").tentative_upto is None
    tentative(soutput, 1, 4, rows(2, 9), rows(3, 9))
    assert given(soutput) == ({1: [1]}, {3: [9]})
    assert soutput.log.tentative("out")[1] == [span(3, 4)]


def test_a_restarted_tentative_line_publishes_no_bucket_twice(soutput: SOutput) -> None:
    """The new line repeats buckets from a better state; consumers keep the published ones."""
    stable(soutput, 0, 0)
    soutput.lines["p"] = 1
    tentative(soutput, 1, 4, rows(2, 9), rows(4, 9))
    stable(soutput, 1, 2, rows(2, 1))
    soutput.lines["p"] = 2
    tentative(soutput, 3, 5, rows(3, 8), rows(4, 8), rows(5, 8), line=2)
    assert given(soutput) == ({2: [1]}, {4: [9], 5: [8]})
    assert soutput.log.tentative("out")[1] == [span(3, 5)]


def test_results_of_an_old_tentative_line_are_dropped(soutput: SOutput) -> None:
    soutput.lines["p"] = 2
    tentative(soutput, 0, 0, rows(0, 9), line=1)
    assert given(soutput) == ({}, {})
    soutput.leave(PATH)
    tentative(soutput, 0, 0, rows(0, 9), line=2)
    assert given(soutput) == ({}, {})


def test_3_5_a_blocking_output_is_not_published_with_the_others(soutput: SOutput) -> None:
    stable(soutput, 0, 1)
    soutput.lines["p"] = 1
    tentative(soutput, 2, 4, rows(4, 9), side_upto=1, side=[rows(3, 8)])
    assert given(soutput, "side") == ({}, {})
    assert soutput.log.info("side").tentative_upto is None
    assert soutput.log.info("out").tentative_upto == 4
    tentative(soutput, 5, 5, side_upto=3, side=[rows(3, 8), rows(5, 8)])
    assert given(soutput, "side") == ({}, {})  # bucket 3 is of an earlier run


def test_empty_buckets_can_be_tentative(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 3)
    assert soutput.log.info("out").tentative_upto == 3
    assert soutput.log.tentative("out") == ([], [span(0, 3)])
    stable(soutput, 0, 3)
    assert soutput.log.info("out").tentative_upto is None


# -- the end of a line, and the tentative buckets of a predecessor --------------------------------


def test_tentative_buckets_remain_valid_after_the_end_of_their_line(
    soutput: SOutput, tmp_path: Folder
) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 2, rows(0, 9), rows(2, 9))
    stable(soutput, 0, 1, rows(0, 1))
    soutput.leave(PATH)
    assert given(soutput) == ({0: [1]}, {2: [9]})
    assert "p" not in soutput.lines and story(tmp_path, Undo) == []


def test_tentative_buckets_of_a_predecessor_are_undone(tmp_path: Folder) -> None:
    soutput = start(tmp_path)
    stable(soutput, 0, 1, rows(0, 1))
    soutput.lines["p"] = 1
    tentative(soutput, 2, 3, rows(2, 9))
    soutput.log.close()

    soutput = start(tmp_path)
    assert given(soutput) == ({0: [1]}, {})
    info = soutput.log.info("out")
    assert (info.complete_upto, info.undos) == (1, 1)
    assert files(tmp_path) == ["b0"]
    soutput.log.close()
    soutput = start(tmp_path)
    assert soutput.log.info("out").undos == 1, "nothing is left to undo"
    # Tentative segments before and after the restart and the correction differ in identity.
    soutput.lines["p"] = 1
    tentative(soutput, 2, 2, rows(2, 8))
    assert soutput.log.tentative("out")[0][0].id.version == 1
    stable(soutput, 2, 2, rows(2, 1))
    assert soutput.log.segments("out", 2, 2)[0].id.version == 2
    soutput.log.close()


# -- files and recovery ---------------------------------------------------------------------------


def test_files_of_replaced_tentative_segments_are_deleted(
    soutput: SOutput, tmp_path: Folder
) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 1, rows(0, 9), rows(1, 9), side=[rows(1, 9)])
    assert files(tmp_path) == ["b0", "b1", "b1"]
    stable(soutput, 0, 0, rows(0, 1))
    assert files(tmp_path) == ["b0", "b1", "b1"]
    stable(soutput, 1, 1)
    assert files(tmp_path) == ["b0"]
    tentative(soutput, 2, 2, rows(2, 9))
    soutput.leave(PATH)
    assert files(tmp_path) == ["b0", "b2"]


def test_the_next_instance_deletes_replaced_files_that_a_crash_left_behind(
    tmp_path: Folder,
) -> None:
    soutput = start(tmp_path)
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    soutput.log.commit("out", [], 0)  # a crash before the deletion
    soutput.log.close()
    assert files(tmp_path) == ["b0"]
    soutput = start(tmp_path)
    assert files(tmp_path) == [] and len(soutput.log.orphans) == 1
    soutput.log.close()


def test_recovery_gives_the_same_state_as_normal_operation(tmp_path: Folder) -> None:
    """After every step, the state read from the manifest equals the state in memory."""
    soutput = start(tmp_path)

    def step(number: int) -> None:
        match number:
            case 0:
                stable(soutput, 0, 1, rows(0, 1))
            case 1:
                soutput.lines["p"] = 1
                tentative(soutput, 2, 3, rows(2, 9), side=[rows(3, 9)])
            case 2:
                tentative(soutput, 4, 4, side=[rows(4, 9)])
            case 3:
                stable(soutput, 2, 3, rows(2, 2), rows(3, 3))
            case 4:
                tentative(soutput, 5, 6, rows(6, 9))
            case 5:
                soutput.lines["p"] = 2
                tentative(soutput, 4, 7, rows(4, 8), rows(7, 8), line=2)
            case 6:
                stable(soutput, 4, 7, rows(4, 4))
                soutput.leave(PATH)
                soutput.log.append(*(Ended(output) for output in PATH.outputs))

    for number in range(7):
        step(number)
        assert read_only(tmp_path).state.streams == soutput.log._state.streams
    assert given(soutput) == ({0: [1], 2: [2], 3: [3], 4: [4]}, {})
    soutput.log.close()


class _Filling(list[tuple[int, pa.Table]]):
    """Results that fill the disk: only the first one fits."""

    def __init__(self, disk: MemoryDisk, *results: tuple[int, pa.Table]) -> None:
        super().__init__(results)
        self.disk = disk

    def __iter__(self) -> Iterator[tuple[int, pa.Table]]:
        for number, result in enumerate(super().__iter__()):
            self.disk.full = number > 0
            yield result


@pytest.mark.parametrize("line", ["stable", "tentative"])
def test_a_failed_write_on_a_full_disk_leaves_no_files_and_can_be_repeated(line: str) -> None:
    disk = MemoryDisk(random.Random(0))
    soutput = start("/node", disk=disk)
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    sizes, info = disk.files("/node/segments"), soutput.log.info("out")

    def step(out: Buckets) -> None:
        if line == "stable":
            soutput.stable(Run("p", 0, 2), PATH, {"out": out, "side": []})
        else:
            run = RunTentative("p", 1, 1, 2, (("out", 2), ("side", 2)), ())
            soutput.tentative(run, {"out": out, "side": []})

    results = [rows(1, 2), rows(2, 3)]
    with pytest.raises(StorageFull):
        step(_Filling(disk, *results))
    assert disk.files("/node/segments") == sizes
    assert soutput.log.info("out") == info
    disk.full = False
    step(results)
    expected = {"stable": ({1: [2], 2: [3]}, {}), "tentative": ({}, {0: [9], 1: [2], 2: [3]})}
    assert given(soutput) == expected[line]


def test_tentative_segments_are_marked_as_tentative(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    (segment,), _ = soutput.log.tentative("out")
    assert segment.stability is Stability.TENTATIVE
    assert soutput.log.segments("out", 0, 99) == []
