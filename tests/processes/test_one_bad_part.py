"""One of two replicas is broken in every way a disk can break: the outputs go on, the bad part is
named with what to do, and heals by itself when it can."""

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
    made = BrokenRun(tmp_path_factory.mktemp("bad") / "storage", "twins", BAD, BAD)
    try:
        made.begin()
        yield made
    finally:
        made.stop()


pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_one_that_stands_still_is_waited_for_by_nobody(story: BrokenRun) -> None:
    story.stand_still()


def test_one_that_is_cut_off_is_waited_for_by_nobody(story: BrokenRun) -> None:
    story.be_cut_off()


def test_deleted_storage_is_rebuilt(story: BrokenRun) -> None:
    delete(story.folder)
    story.until("it to be named", lambda: bool(story.told()))
    story.goes_on()
    story.heals()
    assert (story.folder / "manifest").exists()


def test_storage_that_cannot_be_written_is_waited_for(story: BrokenRun) -> None:
    """A file where the folder was: as root, a read-only folder could be written."""
    away = story.folder.with_name("away")
    story.folder.rename(away)
    story.folder.touch()
    story.until("it to be quarantined", story.is_named(kind="storage", state="quarantined"))
    story.goes_on()
    story.folder.unlink()
    away.rename(story.folder)
    story.heals()


def test_a_full_and_a_read_only_disk_are_waited_for(story: BrokenRun, tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip("only root may mount a small disk")
    story.full_and_read_only()


def test_a_damaged_manifest_is_moved_aside(story: BrokenRun) -> None:
    moved = set(story.folder.parent.glob(f"{BAD}.damaged-*"))
    story.kill(story.damage_manifest)
    story.until("it to be named", story.is_named(kind="damaged"))
    story.goes_on()
    story.heals()
    assert set(story.folder.parent.glob(f"{BAD}.damaged-*")) - moved


@pytest.mark.parametrize("harm", ["damaged", "deleted"])
def test_a_lost_segment_is_computed_again(story: BrokenRun, harm: str) -> None:
    story.lose_segment(harm)
    story.until("it to be named", story.is_named(kind="damaged"))
    story.goes_on()
    story.heals()


def test_a_refused_plan_waits_for_a_person_and_the_others_go_on(story: BrokenRun) -> None:
    def poison() -> None:
        log = Log.open(story.folder, BAD, fsync="never")
        for path in ("windows", "counts", "totals"):
            for bucket, body in log.states(path)[-1:]:
                log.save_state(path, bucket + 1, {**body, "plan": "of another query"}, [])
        log.close()

    story.kill(poison)
    story.until("it to be refused", story.is_named(kind="refused", final=True))
    (told,) = story.told()
    assert "another query" in told["reason"] and "holdfast restart" in told["remedy"]
    story.goes_on()
    shutil.rmtree(story.folder)
    story.run.rolling.restart(BAD)
    story.heals()


def test_a_source_segment_that_is_gone_stops_only_who_still_needs_it(story: BrokenRun) -> None:
    process = story.run.processes[BAD]
    process.pause()
    at = story.given()
    segments = Path(source_folder(str(story.storage), "s1")) / "segments" / "s1"
    story.until("the other one to go on", lambda: story.given() > at + FURTHER)
    lost = [f for f in segments.iterdir() if int(f.name.split(".")[0][1:]) == at + FURTHER // 2]
    kept = {file: file.read_bytes() for file in lost}
    for file in lost:
        file.unlink()
    assert lost, "this bucket has rows"
    process.resume()
    story.until("it to be quarantined", story.is_named(kind="inputs", state="quarantined"))
    (told,) = story.told()
    assert lost[0].name in told["reason"] and "s1" in told["reason"]
    assert "backup" in told["remedy"]
    story.goes_on()
    for file, data in kept.items():
        file.write_bytes(data)
    story.heals()


def test_nothing_was_lost_doubled_or_changed(story: BrokenRun, sessions: Sessions) -> None:
    story.judge(sessions)
