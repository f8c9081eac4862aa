"""Chaos: scenarios on real processes with Spark, judged by the same checkers as the simulator."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import InputError
from holdfast.verify.scenario import Scenario, read_scenario

_FOLDER = Path(__file__).parent / "scenarios"
#: The scenarios that come with Holdfast.
SCENARIOS = {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def find(name: str) -> Scenario:
    """A scenario of ours by its name, or one of yours by its file."""
    if name in SCENARIOS:
        return read_scenario(SCENARIOS[name])
    if name.endswith(".toml") or "/" in name:
        return read_scenario(name)
    raise InputError(
        f"there is no scenario {name!r}; there are: {', '.join(SCENARIOS)}, or name a .toml file"
    )
