"""Membership, layout and standby (Flux sections 2.2 and 5.4): one order of decisions, in a
durable log."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.controller import Controller
from holdfast.errors import SetupError
from holdfast.model.layout import Layout
from holdfast.storage import Log

SILENCE = 2_000
PEERS = {"a.0": "a.0@2", "a.0@2": "a.0", "a.1": "a.1@2", "a.1@2": "a.1"}
LAYOUT: Layout = {
    "edge": ("ingress",),
    "host-1": ("a.0", "a.1@2"),
    "host-2": ("a.1", "a.0@2"),
    "host-3": (),
}


class Story:
    """A controller in a folder, and the heartbeats of its hosts."""

    def __init__(self, folder: Path, layout: Layout = LAYOUT) -> None:
        self.folder, self.layout = folder, layout
        self.start(0)

    def start(self, at: int) -> None:
        self.log = Log.open(str(self.folder), "controller", fsync="never", archive=False)
        self.controller = Controller(self.log, PEERS, at, self.layout, silence_us=SILENCE)

    def restart(self, at: int) -> None:
        self.log.close()
        try:
            self.start(at)
        except SetupError:
            self.log.close()
            raise

    def speak(self, host: str, at: int, epoch: int = 1) -> list[str]:
        """Register a host with all its assigned nodes; return the nodes that are refused."""
        assert self.controller.here(host, epoch, at)
        assigned = self.controller.assigned(host)
        return [n for n in assigned if not self.controller.register(n, f"{host}/{n}", epoch, at)]

    def all_speak(self, at: int, *silent_hosts: str) -> None:
        for host in self.layout:
            if host not in silent_hosts:
                self.speak(host, at)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    story = Story(tmp_path)
    story.all_speak(100)
    return story


NOTHING: tuple[list[str], dict[str, str]] = ([], {})


def lose(story: Story, host: str) -> tuple[list[str], dict[str, str]]:
    """Stop a host. Its nodes move only after new heartbeats from their peers."""
    story.controller.ended(host)
    story.all_speak(200, host)
    dead, moved = story.controller.judge(250)
    assert moved == {}
    story.all_speak(260, host)
    return dead, story.controller.judge(270)[1]


def test_the_standby_takes_over_the_nodes_of_a_lost_host(story: Story) -> None:
    dead, moved = lose(story, "host-2")
    assert dead == ["a.0@2", "a.1"]
    assert moved == {"a.1": "host-3", "a.0@2": "host-3"}
    assert story.controller.assigned("host-2") == []
    assert story.controller.assigned("host-3") == ["a.1", "a.0@2"]
    assert story.controller.judge(310) == NOTHING


def test_a_host_without_heartbeats_keeps_its_nodes_until_silence_has_passed(story: Story) -> None:
    story.all_speak(2_000, "host-2")
    assert story.controller.judge(2_050) == NOTHING
    assert story.controller.judge(2_200) == (["a.0@2", "a.1"], {})
    story.all_speak(2_300, "host-2")
    assert set(story.controller.judge(2_350)[1].values()) == {"host-3"}


def test_a_host_that_was_declared_dead_runs_no_nodes_and_becomes_a_standby(story: Story) -> None:
    lose(story, "host-2")
    assert not story.controller.register("a.1", "host-2/a.1", 1, 400), "the node was declared dead"
    assert story.speak("host-2", 400) == []
    story.controller.ended("host-3")
    story.speak("host-1", 450)
    assert story.controller.judge(500)[1] == {"a.1": "host-2", "a.0@2": "host-2"}, (
        "the first standby died before its take-over was complete"
    )


def test_a_standby_without_heartbeats_takes_over_no_nodes(story: Story) -> None:
    for host in ("host-2", "host-3"):
        story.controller.ended(host)
    story.speak("host-1", 200)
    assert story.controller.judge(300) == (["a.0@2", "a.1"], {})
    story.speak("host-3", 400, epoch=2)
    assert story.controller.judge(450)[1] == {}, "the peers may be dead as well"
    story.speak("host-1", 460)
    assert set(story.controller.judge(470)[1].values()) == {"host-3"}


def test_a_node_without_a_peer_waits_for_its_own_host(story: Story) -> None:
    story.controller.ended("edge")
    assert story.controller.judge(300) == NOTHING
    assert story.controller.assigned("edge") == ["ingress"]


def test_without_any_heartbeat_no_node_is_declared_dead(story: Story) -> None:
    assert story.controller.judge(60_000) == NOTHING


def test_a_restarted_controller_restores_dead_nodes_and_placements_from_its_log(
    story: Story,
) -> None:
    lose(story, "host-2")
    before = story.controller.statuses()
    story.restart(400)
    assert story.controller.assigned("host-3") == ["a.1", "a.0@2"]
    assert story.controller.statuses() == before
    assert story.controller.judge(450) == NOTHING, "no heartbeat has arrived since the restart"


def test_a_replaced_process_is_refused(story: Story) -> None:
    assert story.controller.here("host-1", 2, 300)
    assert not story.controller.here("host-1", 1, 310)


def test_another_number_of_hosts_or_standbys_is_refused(story: Story) -> None:
    lose(story, "host-2")
    story.layout = {host: names for host, names in LAYOUT.items() if names}
    with pytest.raises(SetupError, match="run with as many standby hosts as before"):
        story.restart(400)
    story.layout = {name: (name,) for name in (*PEERS, "ingress")}
    with pytest.raises(SetupError, match=r"expected \d hosts as at .*, found one host per node;"):
        story.restart(500)
