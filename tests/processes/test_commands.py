"""The commands on a running network, as a user types them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

APP = "holdfast.examples.netmon:net"
LIMIT_S = 120.0


def holdfast(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *argv],
        capture_output=True, text=True, cwd=cwd, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.mark.processes
def test_run_status_tail_restart_and_audit(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "holdfast.cli.main", "run", APP, "--deployment", "processes",
        "--audit",
    ]  # fmt: skip
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        described = tmp_path / "holdfast-data" / "netmon" / "run.json"
        deadline_s = time.monotonic() + LIMIT_S
        tail = None
        while tail is None or tail.returncode:  # `tail` fails until the run has started
            assert running.poll() is None, running.stderr.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline_s, tail and tail.stderr
            time.sleep(0.5)
            tail = holdfast("tail", "top_talkers", "-n", "1", "--json", cwd=tmp_path)
            assert "Traceback" not in tail.stderr
        row = json.loads(tail.stdout.splitlines()[0])
        assert set(row) == {"bucket", "src", "bytes", "flows", "window_start", "ts", "stability"}
        status = holdfast("status", "--json", cwd=tmp_path)
        assert status.returncode == 0, status.stderr
        report = json.loads(status.stdout)
        assert report["network"] == "netmon"
        assert report["sources"]["tap0"]["rows"] > 0
        assert report["nodes"][0]["paths"]["top_talkers"]["convergent"] is True
        restart = holdfast("restart", cwd=tmp_path)
        assert restart.returncode == 0, restart.stderr
        assert "host main is back after" in restart.stdout
        unknown = holdfast("restart", "--host", "nobody", cwd=tmp_path)
        assert unknown.returncode == 2 and "hosts: main" in unknown.stderr
        assert holdfast("tail", "top_talkers", "-n", "3", cwd=tmp_path).returncode == 0
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
    # The only host had no replacement, so the audit finds all rows, but a violated contract.
    assert running.returncode == 1, (out, err)
    for output in ("top_talkers", "port_scans"):
        match = re.search(rf"^{output} +(?:ok|failed) .*", out, re.MULTILINE)
        assert match, out
        ideal, received, missing, wrong, duplicated = match[0].split()[3:8]
        assert ideal == received and (missing, wrong, duplicated) == ("0", "0", "0"), out
    assert "promised within 3s" in out
    assert "Traceback" not in err
    assert not described.exists()


@pytest.mark.processes
def test_check_reports_errors_without_a_stack_trace(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "import holdfast as hf\n"
        "net = hf.Network('bad')\n"
        "s = net.source('s', 'ts timestamp, x long', time='ts')\n"
        "net.output('a', s.filter('nope > 0'))\n"
        "net.output('b', s.apply(lambda df: df.groupBy('ts').count()))\n"
    )
    done = holdfast("check", "app.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "nope" in done.stderr
    assert "does not work row by row" in done.stderr
    assert "Traceback" not in done.stderr
    assert "org.apache" not in done.stderr
