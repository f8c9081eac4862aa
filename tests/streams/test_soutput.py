"""SOutput: what the two lines of a path become in a log. Sections are Borealis'. No JVM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import Any

import pyarrow as pa
import pytest

from holdfast.core.moves import Run, RunTentative
from holdfast.errors import NotDeterministic, ProtocolViolation, StorageFull
from holdfast.model.fragments import Path
from holdfast.storage import Ended, Log, RecDone, Tentative, Undo, digest, read_only
from holdfast.storage.manifest import read_records
from holdfast.streams.soutput import SOutput
from holdfast.types import Segment, Stability
from holdfast.verify.sim.memory_disk import MemoryDisk

PATH = Path("p", ("s1", "s2"), ("out", "side"), ())
SCHEMA = "ts timestamp, value bigint"
Buckets = list[tuple[int, pa.Table]]


def rows(bucket: int, *values: int) -> tuple[int, pa.Table]:
    times = pa.array([bucket * 1_000 + at for at in range(len(values))], pa.timestamp("us", "UTC"))
    return bucket, pa.table({"ts": times, "value": pa.array(values, pa.int64())})


def start(root: Folder | str, **how: Any) -> SOutput:
    """As a node does: the streams are opened, and what a predecessor guessed is taken back."""
    log = Log.open(root, "node", fsync="never", **how)
    soutput = SOutput(log, digest)
    soutput.valid_from["p"] = 0
    for output in PATH.outputs:
        log.open_stream(output, SCHEMA, "ts", 0)
        soutput.take_back(output)
    return soutput


@pytest.fixture
def soutput(tmp_path: Folder) -> Iterator[SOutput]:
    soutput = start(tmp_path)
    yield soutput
    soutput.log.close()


def stable(soutput: SOutput, lo: int, hi: int, *out: tuple[int, pa.Table], **how: Any) -> None:
    soutput.stable(Run("p", lo, hi, **how), PATH, {"out": list(out), "side": []})


def tentative(
    soutput: SOutput, lo: int, hi: int, *out: tuple[int, pa.Table], line: int = 1,
    side_upto: int | None = None, side: Buckets | None = None,
) -> None:  # fmt: skip
    outputs = (("out", hi), ("side", hi if side_upto is None else side_upto))
    run = RunTentative("p", line, lo, hi, outputs, missing=("s2",))
    soutput.tentative(run, {"out": list(out), "side": side or []})


def values(soutput: SOutput, segments: list[Segment]) -> dict[int, list[int]]:
    return {s.id.bucket: soutput.log.read(s)["value"].to_pylist() for s in segments}


def given(soutput: SOutput, stream: str = "out") -> tuple[dict[int, list[int]], ...]:
    """What is stable, and what is not, by bucket."""
    log = soutput.log
    return (
        values(soutput, log.segments(stream, 0, 99)),
        values(soutput, log.tentative(stream)[0]),
    )


def files(root: Folder) -> list[str]:
    return sorted(path.name.split(".p0")[0] for path in (root / "segments").rglob("*.parquet"))


def story(root: Folder, *kinds: type) -> list[Any]:
    manifest = root / "manifest"
    records = read_records(manifest.read_bytes(), str(manifest))
    return [record for record in records if isinstance(record, kinds)]


# -- section 3.4.2: stabilizing output streams ----------------------------------------------------


def test_3_4_2_a_single_undo_takes_all_that_was_tentative_back_before_corrections(
    soutput: SOutput, tmp_path: Folder
) -> None:
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    soutput.lines["p"] = 1
    tentative(soutput, 2, 2, rows(2, 30))
    tentative(soutput, 3, 4, rows(3, 40), rows(4, 50))
    assert given(soutput) == ({0: [1], 1: [2]}, {2: [30], 3: [40], 4: [50]})

    stable(soutput, 2, 4, rows(2, 3), rows(3, 4), rows(4, 5))
    assert given(soutput) == ({0: [1], 1: [2], 2: [3], 3: [4], 4: [5]}, {})
    info = soutput.log.info("out")
    assert (info.complete_upto, info.tentative_upto, info.undos) == (4, None, 1)
    assert story(tmp_path, Undo) == [Undo("out", 1, 1), Undo("side", 1, 1)]


def test_3_4_2_corrections_in_pieces_need_no_second_undo(
    soutput: SOutput, tmp_path: Folder
) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 3, rows(0, 9), rows(3, 9))
    stable(soutput, 0, 1, rows(0, 1))
    assert given(soutput) == ({0: [1]}, {})
    stable(soutput, 2, 3, rows(3, 2))
    assert [r for r in story(tmp_path, Undo) if r.stream == "out"] == [Undo("out", -1, 1)]


def test_versions_rise_with_every_correction(soutput: SOutput) -> None:
    log = soutput.log
    stable(soutput, 0, 0, rows(0, 1))
    soutput.lines["p"] = 1
    tentative(soutput, 1, 1, rows(1, 2))
    guessed = log.tentative("out")[0][0].id
    stable(soutput, 1, 1, rows(1, 3))
    corrected = log.segments("out", 1, 1)[0].id
    assert guessed.bucket == corrected.bucket == 1
    assert guessed.version < corrected.version
    soutput.leave(PATH)
    soutput.lines["p"] = 2
    tentative(soutput, 2, 2, rows(2, 4), line=2)
    stable(soutput, 2, 2, rows(2, 4))
    versions = [segment.id.version for segment in log.segments("out", 0, 2)]
    assert versions == sorted(versions) == [0, 1, 2]


def test_a_correction_has_another_identity_than_a_guess_that_was_made_while_it_was_written(
    soutput: SOutput,
) -> None:
    soutput.lines["p"] = 1

    def beside() -> Iterator[tuple[int, pa.Table]]:
        yield rows(0, 1)
        tentative(soutput, 0, 0, rows(0, 9))  # the last run of the line, which took its time
        guesses.extend(segment.id for segment in soutput.log.tentative("out")[0])

    guesses: list[object] = []
    soutput.stable(Run("p", 0, 0), PATH, {"out": beside(), "side": []})  # type: ignore[dict-item]
    assert given(soutput) == ({0: [1]}, {})
    assert soutput.log.segments("out", 0, 0)[0].id not in guesses


def test_what_is_tentative_beyond_a_correction_goes_with_the_undo_and_may_come_again(
    soutput: SOutput,
) -> None:
    """Side by side: the tentative line is ahead, and goes on with what it has not given yet."""
    soutput.lines["p"] = 1
    tentative(soutput, 0, 2, rows(0, 9), rows(2, 9))
    stable(soutput, 0, 0, rows(0, 1))
    assert given(soutput) == ({0: [1]}, {})
    tentative(soutput, 3, 3, rows(3, 9))
    info, (_, spans) = soutput.log.info("out"), soutput.log.tentative("out")
    assert info.tentative_upto == 3
    assert spans == [Tentative("out", 3, 3, ("s2",))]


def test_an_output_that_guessed_nothing_has_nothing_undone(soutput: SOutput) -> None:
    """The other one was blocked."""
    stable(soutput, 0, 1, rows(0, 1))
    soutput.lines["p"] = 1
    tentative(soutput, 2, 5, rows(5, 9), side_upto=1)
    stable(soutput, 2, 5, rows(5, 2))
    assert (soutput.log.info("out").undos, soutput.log.info("side").undos) == (1, 0)


def test_property_4_stable_is_never_undone_and_a_run_again_changes_nothing(
    soutput: SOutput, tmp_path: Folder
) -> None:
    """Duplicate elimination: what was logged before is compared, not given again."""
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    before, held = given(soutput), files(tmp_path)
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    assert given(soutput) == before and files(tmp_path) == held
    assert story(tmp_path, Undo) == []
    stable(soutput, 1, 2, rows(1, 2), rows(2, 3))
    assert given(soutput)[0] == {0: [1], 1: [2], 2: [3]}
    with pytest.raises(ProtocolViolation, match="stable is never undone"):
        soutput.log.append(Undo("out", 1, 1))


def test_3_2_a_run_again_that_gives_something_else_is_not_deterministic(soutput: SOutput) -> None:
    stable(soutput, 0, 1, rows(0, 1), rows(1, 2))
    with pytest.raises(NotDeterministic, match="output 'out', bucket 1"):
        stable(soutput, 1, 2, rows(1, 7), rows(2, 3))
    assert given(soutput)[0] == {0: [1], 1: [2]}


def test_3_4_1_what_is_run_again_to_rebuild_a_state_counts_for_nothing(soutput: SOutput) -> None:
    """Undo/redo starts from nothing: before it has healed, results are not what they were."""
    stable(soutput, 0, 3, rows(2, 1), rows(3, 2))
    soutput.lines["p"] = 1
    tentative(soutput, 4, 4, rows(4, 9))
    stable(soutput, 2, 4, rows(2, 77), rows(3, 78), rows(4, 3), rebuild_from=4)
    assert given(soutput) == ({2: [1], 3: [2], 4: [3]}, {})


def test_3_4_4_results_of_a_state_that_has_not_healed_are_given_to_nobody(
    soutput: SOutput,
) -> None:
    soutput.valid_from["p"] = 3
    soutput.lines["p"] = 1
    tentative(soutput, 0, 4, rows(2, 9), rows(3, 9))
    assert given(soutput)[1] == {3: [9]}
    stable(soutput, 0, 4, rows(2, 1), rows(3, 2))
    assert given(soutput)[0] == {3: [2]}


# -- what a tentative line may still give ---------------------------------------------------------


def test_what_the_stable_line_has_overtaken_is_not_given_any_more(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    stable(soutput, 0, 2, rows(1, 1))
    tentative(soutput, 0, 2, rows(0, 9), rows(2, 9))
    assert given(soutput) == ({1: [1]}, {})
    assert soutput.log.info("out").tentative_upto is None
    tentative(soutput, 1, 4, rows(2, 9), rows(3, 9))
    assert given(soutput) == ({1: [1]}, {3: [9]})
    assert soutput.log.tentative("out")[1] == [Tentative("out", 3, 4, ("s2",))]


def test_what_an_old_line_gives_does_not_count(soutput: SOutput) -> None:
    soutput.lines["p"] = 2
    tentative(soutput, 0, 0, rows(0, 9), line=1)
    assert given(soutput) == ({}, {})
    soutput.leave(PATH)
    tentative(soutput, 0, 0, rows(0, 9), line=2)
    assert given(soutput) == ({}, {})


def test_3_5_an_output_that_blocks_is_not_given_with_the_others(soutput: SOutput) -> None:
    stable(soutput, 0, 1)
    soutput.lines["p"] = 1
    tentative(soutput, 2, 4, rows(4, 9), side_upto=1, side=[rows(3, 8)])
    assert given(soutput, "side") == ({}, {})
    assert soutput.log.info("side").tentative_upto is None
    assert soutput.log.info("out").tentative_upto == 4
    tentative(soutput, 5, 5, side_upto=3, side=[rows(3, 8), rows(5, 8)])
    assert given(soutput, "side") == ({}, {})  # bucket 3 is of an earlier run


def test_empty_buckets_are_tentative_too(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 3)
    assert soutput.log.info("out").tentative_upto == 3
    assert soutput.log.tentative("out") == ([], [Tentative("out", 0, 3, ("s2",))])
    stable(soutput, 0, 3)
    assert soutput.log.info("out").undos == 1


# -- REC_DONE, and what a predecessor left --------------------------------------------------------


def test_3_4_2_rec_done_closes_a_failure_and_what_is_left_of_it_goes(
    soutput: SOutput, tmp_path: Folder
) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 2, rows(0, 9), rows(2, 9))
    stable(soutput, 0, 1, rows(0, 1))
    tentative(soutput, 3, 3, rows(3, 9))
    soutput.leave(PATH)
    assert given(soutput) == ({0: [1]}, {})
    info = soutput.log.info("out")
    assert (info.undos, info.rec_dones, info.tentative_upto) == (2, 1, None)
    last = [r for r in story(tmp_path, Undo, RecDone) if r.stream == "out"][-2:]
    assert last == [Undo("out", 1, 2), RecDone("out", 1, 1)]
    assert "p" not in soutput.lines


def test_rec_done_without_anything_left_undoes_nothing(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    stable(soutput, 0, 0, rows(0, 1))
    soutput.leave(PATH)
    info = soutput.log.info("out")
    assert (info.undos, info.rec_dones) == (1, 1)


def test_what_a_predecessor_guessed_is_taken_back(tmp_path: Folder) -> None:
    soutput = start(tmp_path)
    stable(soutput, 0, 1, rows(0, 1))
    soutput.lines["p"] = 1
    tentative(soutput, 2, 3, rows(2, 9))
    soutput.log.close()

    soutput = start(tmp_path)
    assert given(soutput) == ({0: [1]}, {})
    info = soutput.log.info("out")
    assert (info.complete_upto, info.undos, info.rec_dones) == (1, 1, 0)
    assert files(tmp_path) == ["b0"]
    soutput.log.close()
    soutput = start(tmp_path)
    assert soutput.log.info("out").undos == 1, "nothing is left to take back"
    soutput.log.close()


# -- files and recovery ---------------------------------------------------------------------------


def test_files_of_what_was_undone_are_deleted(soutput: SOutput, tmp_path: Folder) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 1, rows(0, 9), rows(1, 9), side=[rows(1, 9)])
    assert files(tmp_path) == ["b0", "b1", "b1"]
    stable(soutput, 0, 1, rows(0, 1))
    assert files(tmp_path) == ["b0"]
    tentative(soutput, 2, 2, rows(2, 9))
    soutput.leave(PATH)
    assert files(tmp_path) == ["b0"]


def test_files_that_a_crash_left_after_an_undo_are_deleted_by_the_next_instance(
    tmp_path: Folder,
) -> None:
    soutput = start(tmp_path)
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    soutput.log.append(Undo("out", -1, 1))  # the crash comes before the deletion
    soutput.log.close()
    assert files(tmp_path) == ["b0"]
    soutput = start(tmp_path)
    assert files(tmp_path) == [] and len(soutput.log.orphans) == 1
    soutput.log.close()


def test_recovery_is_the_same_function_as_running(tmp_path: Folder) -> None:
    """After every step, whoever reads the manifest knows what the running log does."""
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
                soutput.leave(PATH)
            case 6:
                soutput.lines["p"] = 2
                tentative(soutput, 4, 4, rows(4, 9), line=2)
            case 7:
                stable(soutput, 4, 4, rows(4, 4))
                soutput.leave(PATH)
                soutput.log.append(*(Ended(output) for output in PATH.outputs))

    for number in range(8):
        step(number)
        assert read_only(tmp_path).state.streams == soutput.log._state.streams
    assert given(soutput) == ({0: [1], 2: [2], 3: [3], 4: [4]}, {})
    soutput.log.close()


class _Filling(list[tuple[int, pa.Table]]):
    """Results of which only the first find room on the disk."""

    def __init__(self, disk: MemoryDisk, *results: tuple[int, pa.Table]) -> None:
        super().__init__(results)
        self.disk = disk

    def __iter__(self) -> Iterator[tuple[int, pa.Table]]:
        for number, result in enumerate(super().__iter__()):
            self.disk.full = number > 0
            yield result


@pytest.mark.parametrize("line", ["stable", "tentative"])
def test_a_full_disk_leaves_nothing_behind_and_the_step_can_be_done_again(line: str) -> None:
    disk = MemoryDisk(random.Random(0))
    soutput = start("/node", disk=disk)
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    held, known = disk.files("/node/segments"), soutput.log.info("out")

    def step(out: Buckets) -> None:
        if line == "stable":
            soutput.stable(Run("p", 0, 2), PATH, {"out": out, "side": []})
        else:
            run = RunTentative("p", 1, 1, 2, (("out", 2), ("side", 2)), ())
            soutput.tentative(run, {"out": out, "side": []})

    results = [rows(1, 2), rows(2, 3)]
    with pytest.raises(StorageFull):
        step(_Filling(disk, *results))
    assert disk.files("/node/segments") == held
    assert soutput.log.info("out") == known
    disk.full = False
    step(results)
    expected = {"stable": ({1: [2], 2: [3]}, {}), "tentative": ({}, {0: [9], 1: [2], 2: [3]})}
    assert given(soutput) == expected[line]


def test_tentative_rows_are_marked_as_such(soutput: SOutput) -> None:
    soutput.lines["p"] = 1
    tentative(soutput, 0, 0, rows(0, 9))
    (segment,), _ = soutput.log.tentative("out")
    assert segment.stability is Stability.TENTATIVE
    assert soutput.log.segments("out", 0, 99) == []
