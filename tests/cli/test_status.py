"""`holdfast status` of a run with unhealthy components."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cli.status_view import show_status

STATUS: dict[str, Any] = {
    "network": "netmon",
    "deployment": "processes",
    "sources": {},
    "nodes": [{"node": "main@2", "host": "main@2"}],
    "hosts": {"main@2": ["main@2"]},
    "clients": {},
    "contracts": {},
    "failures": [],
    "unhealthy": [
        {
            "part": "main@2", "what": "node", "host": "main@2", "state": "quarantined",
            "kind": "storage", "reason": "nodes/main@2: Read-only [ext4].", "failures": 4,
            "remedy": "restarts automatically; if the error persists, free or repair its storage",
            "quarantined": True, "out": True, "final": False, "for_ms": 12_000,
            "retry_in_ms": 4_200,
        }
    ],
    "differs": {"main": ["bucket 7 of 'top' differs between replicas: here 5f, main@2 a1"]},
    "stopped": {"top": "node main@2 quarantined: nodes/main@2: Read-only"},
}  # fmt: skip


def test_an_unhealthy_component_is_shown_with_reason_next_restart_and_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status(STATUS, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "node main@2 on main@2 quarantined for 12 s, 4 failures in a row, next restart in 4 s: "
        "nodes/main@2: Read-only [ext4]. Remedy: restarts automatically; if the error persists, "
        "free or repair its storage" in out
    )
    assert "node main: bucket 7 of 'top' differs between replicas: here 5f" in out
    assert "output top stopped, no replica is left: node main@2 quarantined" in out
