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


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / "holdfast"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / bug.file).read_text()
    (copy / bug.file).write_text(text.replace(bug.old, bug.new))
    found = subprocess.run(
        [sys.executable, "-c", SEARCH], cwd=tmp_path, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.startswith("seed"), f"{bug.name}: not found in {NETWORKS} networks"
