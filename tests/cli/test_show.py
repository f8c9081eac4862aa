"""What `status` shows of a run: which processes there are, and what failed. No JVM."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cli.show import show_status


def status(**more: Any) -> dict[str, Any]:
    told = {
        "network": "netmon", "deployment": "processes", "pid": 4711, "sources": {}, "nodes": [],
        "hosts": {"main": ["main"], "spare": []}, "contracts": {}, "failures": [],
        "processes": {
            "main": {"pid": 4712, "restarts": 1}, "spare": {"pid": 4713, "restarts": 0}
        },
    }  # fmt: skip
    return told | more


def test_processes_are_shown_with_their_pids(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(status(), as_json=False)
    shown = capsys.readouterr().out
    assert "deployment processes, pid 4711" in shown
    assert "host main: pid 4712, restarted 1 times, runs main" in shown
    assert "host spare: pid 4713, restarted 0 times, stands by" in shown


def test_failures_are_shown_once_with_what_depends_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "path 'out', buckets 1 to 1: KeyError: 'page', at /srv/app.py:7 in parse"
    failure = {
        "node": "main", "outputs": ["out", "other"], "message": text, "permanent": True,
        "user_location": "/srv/app.py:7 in parse", "at": 0,
    }  # fmt: skip
    show_status(
        status(
            failures=[failure, failure | {"node": "second", "outputs": [], "permanent": False}],
            nodes=[{"node": "main", "failure": text}],
        ),
        as_json=False,
    )
    shown = capsys.readouterr().out
    assert f"main failed (out, other depends on it): {text}\n" in shown
    assert f"second has trouble and tries again: {text}\n" in shown
    assert shown.count("KeyError") == 2
