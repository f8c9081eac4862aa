"""Hosts are killed, one of them with its storage, and others take their place (Flux, section 5)."""

from __future__ import annotations

import pytest

from holdfast.experiments import pairs


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_two_hosts_are_lost_one_after_the_other() -> None:
    found = pairs.run(True, print)
    assert found["lossless"] and found["second_kill_lossless"] and found["duplicates"] == 0
    assert found["within_bounds"], found
    assert found["state_moved_bytes"] > 0 and found["runs"][0]["result_rows"] > 0
