"""Fixtures shared by the tests of simulated runs."""

from __future__ import annotations

import pytest

from tests.verify.sim.lab import Lab


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)
