"""Hosts are killed, one of them with its storage, and other hosts take over their
nodes (Flux section 5)."""

from __future__ import annotations

import pytest

from holdfast.experiments import pairs


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_pairs_survive_the_loss_of_two_hosts_one_after_the_other() -> None:
    result = pairs.run(True, print)
    assert result["lossless"] and result["second_loss_lossless"] and result["duplicates"] == 0
    assert result["within_bounds"], result
    assert result["state_moved_bytes"] > 0 and result["runs"][0]["result_rows"] > 0
