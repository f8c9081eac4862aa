"""Chaos tests: fault scenarios on real processes with Spark.

The checkers that judge the simulator judge these runs too.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import InputError
from holdfast.verify.scenario import Scenario, read_scenario

_FOLDER = Path(__file__).parent / "scenarios"
#: Built-in scenarios: name to file.
SCENARIOS = {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def find(name: str) -> Scenario:
    """Return a built-in scenario by name, or read a scenario from a TOML file."""
    if name in SCENARIOS:
        return read_scenario(SCENARIOS[name])
    if name.endswith(".toml") or "/" in name:
        return read_scenario(name)
    raise InputError(
        f"there is no scenario {name!r}; there are: {', '.join(SCENARIOS)}, or name a .toml file"
    )
