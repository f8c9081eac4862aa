"""One of two replicas is broken in every way a disk can break: the outputs continue, the bad
component is reported with a remedy, and recovers automatically where this is possible."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.session import Sessions
from holdfast.runtime.folders import source_folder
from holdfast.storage import Log
from tests.processes.broken_run import FURTHER, BrokenRun, delete, may_mount

BAD = "main@2"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenRun]:
    story = BrokenRun(tmp_path_factory.mktemp("bad") / "storage", "twins", BAD, BAD)
    try:
        story.begin()
        yield story
    finally:
        story.stop()


pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_outputs_continue_while_a_replica_is_suspended(story: BrokenRun) -> None:
    story.stand_still()


def test_outputs_continue_while_a_replica_is_cut_off(story: BrokenRun) -> None:
    story.be_cut_off()


def test_deleted_storage_is_rebuilt(story: BrokenRun) -> None:
    delete(story.folder)
    story.until("the node to be reported", lambda: bool(story.reported()))
    story.goes_on()
    story.heals()
    assert (story.folder / "manifest").exists()


def test_a_replica_waits_for_unwritable_storage(story: BrokenRun) -> None:
    """A file replaces the folder, because root could write to a read-only folder."""
    away = story.folder.with_name("away")
    story.folder.rename(away)
    story.folder.touch()
    story.until("the node to be quarantined", story.is_named(kind="storage", state="quarantined"))
    story.goes_on()
    story.folder.unlink()
    away.rename(story.folder)
    story.heals()


def test_a_replica_waits_while_its_disk_is_full_or_read_only(
    story: BrokenRun, tmp_path: Path
) -> None:
    if not may_mount(tmp_path):
        pytest.skip("only root may mount a small disk")
    story.full_and_read_only()


def test_storage_with_a_damaged_manifest_is_moved_aside(story: BrokenRun) -> None:
    moved = set(story.folder.parent.glob(f"{BAD}.damaged-*"))
    story.kill(story.damage_manifest)
    story.until("the node to be reported", story.is_named(kind="damaged"))
    story.goes_on()
    story.heals()
    assert set(story.folder.parent.glob(f"{BAD}.damaged-*")) - moved


@pytest.mark.parametrize("harm", ["damaged", "deleted"])
def test_a_lost_segment_is_recomputed(story: BrokenRun, harm: str) -> None:
    story.lose_segment(harm)
    story.until("the node to be reported", story.is_named(kind="damaged"))
    story.goes_on()
    story.heals()


def test_a_refused_plan_waits_for_an_operator_and_the_other_replica_continues(
    story: BrokenRun,
) -> None:
    def poison() -> None:
        log = Log.open(story.folder, BAD, fsync="never")
        for path in ("windows", "counts", "totals"):
            for bucket, body in log.states(path)[-1:]:
                log.save_state(path, bucket + 1, {**body, "plan": "of another query"}, [])
        log.close()

    story.kill(poison)
    story.until("the node to be refused", story.is_named(kind="refused", final=True))
    (status,) = story.reported()
    assert "another query" in status["reason"] and "holdfast restart" in status["remedy"]
    story.goes_on()
    shutil.rmtree(story.folder)
    story.run.rolling.restart(BAD)
    story.heals()


def test_a_lost_source_segment_stops_only_the_replica_that_still_needs_it(story: BrokenRun) -> None:
    process = story.run.processes[BAD]
    process.pause()
    at = story.given()
    segments = Path(source_folder(str(story.storage), "s1")) / "segments" / "s1"
    story.until("the other replica to continue", lambda: story.given() > at + FURTHER)
    lost = [f for f in segments.iterdir() if int(f.name.split(".")[0][1:]) == at + FURTHER // 2]
    contents = {file: file.read_bytes() for file in lost}
    for file in lost:
        file.unlink()
    assert lost, "this bucket has rows"
    process.resume()
    story.until("the node to be quarantined", story.is_named(kind="inputs", state="quarantined"))
    (status,) = story.reported()
    assert lost[0].name in status["reason"] and "s1" in status["reason"]
    assert "backup" in status["remedy"]
    story.goes_on()
    for file, data in contents.items():
        file.write_bytes(data)
    story.heals()


def test_no_row_was_lost_duplicated_or_changed(story: BrokenRun, sessions: Sessions) -> None:
    story.judge(sessions)
