"""What the README says can be typed, can be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.cli.main import _parser
from holdfast.model.network import Network
from holdfast.verify.chaos import find
from holdfast.verify.sim.simulation import simulate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


COMMANDS = [
    line.split("#", 1)[0].strip()
    for block in blocks("sh")
    for line in block.splitlines()
    if line.startswith("holdfast ")
] + re.findall(r"`(holdfast (?:run|check|experiment) [^`]*)`", README)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    _parser().parse_args(command.split()[1:])


def test_the_query_of_the_readme_is_well_formed() -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    net = names["net"]
    assert isinstance(net, Network)
    net.check()


def test_the_session_is_what_the_command_prints() -> None:
    (session,) = blocks("text")
    story = simulate(find("tentative")).world.transcript()
    shown = [line.strip() for line in session.splitlines() if line.strip() not in ("", "…")]
    told = iter([line.strip() for line in story.splitlines()])
    assert [line for line in shown if line not in told] == []  # in this order


def test_every_file_it_points_to_exists() -> None:
    for path in re.findall(r"`(tests/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
