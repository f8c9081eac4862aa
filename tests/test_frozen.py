"""Values are frozen for the type checker, and at run time in Python's development mode."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from holdfast.core.subscription import Poll, Position
from holdfast.types import SegmentId

ASSIGNS = """
from holdfast.core.subscription import Poll
Poll("main", None).replica = "other"
"""


def test_values_are_compared_and_hashed_by_content() -> None:
    position = Position(3, 2, 1)
    assert Poll("main", position) == Poll("main", Position(3, 2, 1))
    assert len({Poll("main", position), Poll("main", position), Poll("main", None)}) == 2
    assert Poll("main", None) != ("main", None)


def test_values_are_ordered_and_can_be_replaced() -> None:
    first = SegmentId("s", 0, 1, 0, 0)
    assert first < replace(first, bucket=2)


def test_in_development_mode_an_assignment_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", ASSIGNS],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "FrozenInstanceError" in done.stderr
