"""Every command in the README works, and every block of the README is run."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.cli.main import _parser
from holdfast.model.network import Network
from holdfast.verify.chaos import find
from holdfast.verify.sim.simulation import simulate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LIMIT_S = 180.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    lines = [line.split("#", 1)[0].strip() for line in block.splitlines()]
    return [line for line in lines if line]


#: The blocks of the README, by name; the tests below run them. A new block needs a name here.
MAKE, RUN, WATCH, AUDIT = blocks("sh")
APP, PROGRAM, PAIRS = blocks("python")
(SESSION,) = blocks("text")


def test_every_block_is_run_by_a_test() -> None:
    assert README.count("\n```") == 2 * len([MAKE, RUN, WATCH, AUDIT, APP, PROGRAM, PAIRS, SESSION])


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


COMMANDS = [
    *(line for block in blocks("sh") for line in commands(block) if line.startswith("holdfast ")),
    *re.findall(r"`(holdfast (?:run|check|experiment) [^`]*)`", README),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    _parser().parse_args(command.split()[1:])


@pytest.mark.parametrize("app", [APP, APP + PAIRS], ids=["query", "with pairs"])
def test_the_query_is_well_formed_and_has_rows(app: str) -> None:
    names: dict[str, object] = {}
    exec(app, names)
    net = names["net"]
    assert isinstance(net, Network)
    net.check()
    assert all(source.feed is not None for source in net.sources)


def test_the_session_matches_the_output_of_the_command() -> None:
    transcript = simulate(find("tentative")).world.transcript()
    shown = [line.strip() for line in SESSION.splitlines() if line.strip() not in ("", "…")]
    printed = iter([line.strip() for line in transcript.splitlines()])
    assert [line for line in shown if line not in printed] == []  # in this order


def test_every_referenced_file_exists() -> None:
    for path in re.findall(r"`(tests/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


def test_the_command_is_in_the_documented_folder() -> None:
    assert "`.venv/bin/holdfast`" in README
    assert re.search(r"^VENV := \.venv$", (ROOT / "Makefile").read_text(), re.MULTILINE)


# -- real runs of the unchanged blocks, each in its own folder -----------------------------------


def environment() -> dict[str, str]:
    """With the command on the PATH, as after `source .venv/bin/activate`, and this source tree."""
    paths = {"PATH": os.path.dirname(sys.executable), "PYTHONPATH": str(ROOT / "src")}
    inherited = {name: os.environ.get(name, "") for name in paths}
    joined = {name: os.pathsep.join(filter(None, (paths[name], inherited[name]))) for name in paths}
    return {**os.environ, **joined, "COLUMNS": "200"}


def typed(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(), capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def audited(report: str, *outputs: str) -> None:
    """All rows and no others were received. Delays depend on the load of the machine."""
    for output in outputs:
        summary = re.search(rf"^{output} +(?:ok|failed) .*", report, re.MULTILINE)
        assert summary, report
        ideal, received, *wrong = summary[0].split()[3:8]
        assert ideal == received != "0" and wrong == ["0", "0", "0"], report


class Terminal:
    """A command that runs until it is interrupted, and its output."""

    def __init__(self, line: str, cwd: Path) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=cwd, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as printed:
            for line in printed:
                self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, text: str) -> None:
        printed: list[str] = []
        deadline_s = time.monotonic() + LIMIT_S
        while not (printed and text in printed[-1]):
            line = self.lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            assert line is not None, "".join(printed)
            printed.append(line)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(LIMIT_S)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_query_shows_rows_survives_a_kill_and_is_audited(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (line,) = commands(RUN)
    with Terminal(line, tmp_path) as terminal:
        terminal.wait_for("src=10.0.0.")
        status, tail, kill, again = commands(WATCH)
        first_status = typed(status, tmp_path)
        assert first_status.returncode == 0, first_status.stderr
        (pid,) = re.findall(r"^main +(\d+) ", first_status.stdout, re.MULTILINE)
        tailed = typed(tail, tmp_path)
        assert tailed.returncode == 0, tailed.stderr
        assert "src=10.0.0." in tailed.stdout
        assert "PID" in kill
        assert typed(kill.replace("PID", pid), tmp_path).returncode == 0
        output, deadline_s = "", time.monotonic() + LIMIT_S
        while not re.search(r"^host main: 1 restart$", output, re.MULTILINE):
            assert time.monotonic() < deadline_s, output
            output = typed(again, tmp_path).stdout
        terminal.wait_for("src=10.0.0.")
        assert terminal.interrupt() == 0
    (audit,) = commands(AUDIT)
    audited(typed(audit, tmp_path).stdout, "top_talkers")


@pytest.mark.spark
def test_the_program_prints_its_rows_and_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = typed("python program.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "STABLE [{'page': '/', 'n': 1, " in done.stdout
    assert "{'page': '/docs', 'n': 1, " in done.stdout


@pytest.mark.spark
def test_the_query_with_pairs_runs(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP + PAIRS)
    done = typed("holdfast run app.py --seconds 12 --audit", tmp_path)
    assert " busy bucket " in done.stdout, (done.stdout, done.stderr)
    audited(done.stdout, "busy", "top_talkers")


@pytest.mark.spark
def test_the_demo_runs(tmp_path: Path) -> None:
    assert "make demo" in MAKE
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"\$\(BIN\)/(holdfast run \S+netmon:net .*)", makefile)
    done = typed(command.replace("--seconds 30", "--seconds 8"), tmp_path)
    assert "top_talkers bucket" in done.stdout, (done.stdout, done.stderr)
    audited(done.stdout, "top_talkers")
