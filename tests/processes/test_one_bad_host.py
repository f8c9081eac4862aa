"""The storage of one host of pairs is broken: its nodes are rebuilt from their peers (Flux section
3.3), and the other nodes continue."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.session import Sessions
from tests.processes.broken_run import BrokenRun, delete, may_mount

BAD, HOST = "main.0", "host-1"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenRun]:
    story = BrokenRun(tmp_path_factory.mktemp("bad") / "storage", "paired", BAD, HOST, hosts=2)
    try:
        story.begin()
        yield story
    finally:
        story.stop()


pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_outputs_continue_while_a_host_is_suspended(story: BrokenRun) -> None:
    story.stand_still()


def test_outputs_continue_while_a_host_is_cut_off(story: BrokenRun) -> None:
    story.be_cut_off()


def test_deleted_storage_of_a_host_is_rebuilt_from_the_peers(story: BrokenRun) -> None:
    delete(story.folder.parent)
    story.until("the node to be reported", lambda: bool(story.reported()))
    story.goes_on()
    story.heals()


def test_storage_with_a_damaged_manifest_is_moved_aside(story: BrokenRun) -> None:
    story.kill(story.damage_manifest)
    story.until("the node to be reported", story.is_named(kind="damaged"))
    story.goes_on()
    story.heals()
    assert list(story.folder.parent.glob(f"{BAD}.damaged-*"))


@pytest.mark.parametrize("harm", ["damaged", "deleted"])
def test_a_lost_segment_is_rebuilt_from_the_peer(story: BrokenRun, harm: str) -> None:
    story.lose_segment(harm)
    story.until("the node to be reported", story.is_named(kind="damaged"))
    story.goes_on()
    story.heals()


def test_a_node_waits_for_unwritable_storage_while_the_other_node_of_its_host_works(
    story: BrokenRun,
) -> None:
    away = story.folder.with_name("away")
    story.folder.rename(away)
    story.folder.touch()
    story.until("the node to be quarantined", story.is_named(kind="storage", state="quarantined"))
    story.goes_on()
    assert [status["part"] for status in story.reported()] == [BAD], (
        "the other node of the host works"
    )
    story.folder.unlink()
    shutil.rmtree(away)
    story.heals()


def test_a_node_waits_while_its_disk_is_full_or_read_only(story: BrokenRun, tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip("only root may mount a small disk")
    story.full_and_read_only()


def test_no_row_was_lost_duplicated_or_changed(story: BrokenRun, sessions: Sessions) -> None:
    story.judge(sessions)
