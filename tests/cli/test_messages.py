"""Bad input at the command line: one clear message each, exit code 2, no stack trace. No JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cli.main import main
from holdfast.cli.show import show_network
from holdfast.experiments import EXPERIMENTS

GOOD = """
import holdfast as hf
net = hf.Network("good")
s = net.source("s", "ts timestamp, x long", time="ts")
net.output("out", s.filter("x > 0"))
"""


def run(
    *argv: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *argv],
        capture_output=True, text=True, cwd=cwd, timeout=120, env={**os.environ, **(env or {})},
    )  # fmt: skip


def test_missing_java_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(GOOD)
    done = run(
        "check", "app.py", cwd=tmp_path, env={"JAVA_HOME": str(tmp_path), "PATH": "/nowhere"}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: Java was not found: JAVA_HOME=")
    assert "openjdk-17-jre-headless" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("check", "app.py", cwd=tmp_path, env={"JAVA_HOME": "", "PATH": "/nowhere"})
    assert "no `java` on the PATH" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["status"], "expected one network, but there is none in ./holdfast-data"),
        (["status", "--storage", "nowhere"], "no run is using nowhere"),
        (["tail", "out", "--storage", "nowhere"], "no run is using nowhere"),
        (["experiment", "nope"], "there is no experiment 'nope'"),
    ],
)
def test_errors_of_commands_state_what_to_do_next(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_run_of_another_version_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C14: its run.json has other fields."""
    (tmp_path / "run.json").write_text('{"addresses": ["127.0.0.1:1"]}')
    assert main(["status", "--storage", str(tmp_path)]) == 2
    assert "expected the fields address; the run uses another version" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["status"], ["tail", "out"], ["retire", "s"], ["restart"]])
def test_a_run_that_was_killed_is_reported(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run.json remains."""
    (tmp_path / "run.json").write_text('{"address": "127.0.0.1:1", "pid": 4711}')
    assert main([*argv, "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"the run on {tmp_path} does not answer: 127.0.0.1:1 is unreachable" in error
    assert "If process 4711 is gone, start the run again" in error


@pytest.mark.parametrize("command", ["run", "check", "status", "tail", "audit", "experiment"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_version_and_experiment_list_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("holdfast 0.")
    assert main(["experiment", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)


def test_eventual_checkpoints_are_a_choice_of_a_fragment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text(GOOD)
    assert main(["run", str(tmp_path / "app.py"), "--recovery", "cec"]) == 2
    assert "net.protect('main', recovery='cec')" in capsys.readouterr().err


def test_check_shows_the_options_of_protect(capsys: pytest.CaptureFixture[str]) -> None:
    net = hf.Network("net")
    net.protect("main", recovery="cec", recovery_time="2s")
    net.protect("edge")
    show_network(net, compiled=None)
    out = capsys.readouterr().out
    assert "fragment main: recovery='cec', recovery_time='2s'\n" in out
    assert "fragment edge: options of protect are the defaults\n" in out
