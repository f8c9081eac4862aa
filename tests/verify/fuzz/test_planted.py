"""The random networks find bugs that are planted in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.verify.fuzz.planted import BUGS, Bug

PACKAGE = Path(holdfast.__file__).parent
#: Networks within which each bug must be found.
NETWORKS = 150
#: Runs seeds until one fails, and prints it.
SEARCH = f"""
from holdfast.config import Options
from holdfast.engine import session
from holdfast.verify.fuzz.tester import Summary, check_seed

sessions = session.start(Options(master="local[2]", memory="1g"))
for seed in range(1, {NETWORKS} + 1):
    failure = check_seed(seed, sessions, Summary())
    if failure:
        print(f"seed {{seed}}: {{failure.differences[0][:300]}}")
        break
"""


def test_every_planted_bug_changes_the_text_once() -> None:
    for bug in BUGS:
        assert (PACKAGE / bug.file).read_text().count(bug.old) == 1, bug.name


def search(folder: Path) -> str:
    """The first failing seed of the package in a folder, with its difference; empty if none."""
    found = subprocess.run(
        [sys.executable, "-c", SEARCH], cwd=folder, capture_output=True, text=True, timeout=1_500,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def copied(folder: Path) -> Path:
    copy = folder / "holdfast"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.soak
@pytest.mark.timeout(1_600)
def test_nothing_is_found_without_a_planted_bug(tmp_path: Path) -> None:
    copied(tmp_path)
    assert search(tmp_path) == ""


@pytest.mark.soak
@pytest.mark.timeout(1_600)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    copy = copied(tmp_path)
    text = (copy / bug.file).read_text()
    (copy / bug.file).write_text(text.replace(bug.old, bug.new))
    assert search(tmp_path).startswith("seed"), f"{bug.name}: not found in {NETWORKS} networks"
