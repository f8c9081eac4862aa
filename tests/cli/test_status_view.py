"""`holdfast status` on a terminal of 80 columns. No JVM."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from holdfast.cli.show import broken_text
from holdfast.cli.status_view import show_status

WIDTH_US = 500_000


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def now() -> int:
    """The bucket that ended last."""
    return int(time.time() * 1e6) // WIDTH_US - 1


def at(bucket: int) -> str:
    return f"{datetime.fromtimestamp((bucket + 1) * WIDTH_US / 1e6):%H:%M:%S.%f}"[:-5]


def status(**changes: Any) -> dict[str, Any]:
    body = {
        "network": "netmon", "deployment": "processes", "pid": 4711, "bucket_us": WIDTH_US,
        "sources": {}, "nodes": [], "hosts": {"main": ["main"], "spare": []}, "contracts": {},
        "failures": [],
        "processes": {
            "main": {"pid": 4712, "restarts": 1}, "spare": {"pid": 4713, "restarts": 0}
        },
    }  # fmt: skip
    return body | changes


def source(upto: int | None, *, ended: bool = False) -> dict[str, Any]:
    return {
        "complete_upto": upto, "ended": ended, "rows": 1_234_567, "late_rows": 12, "future_rows": 0,
        "dead_letter_rows": 12, "restamped_rows": 0, "clock_steps": 0, "clock_apart_ms": 0.0,
    }  # fmt: skip


def node(name: str, pid: int, **paths: dict[str, Any]) -> dict[str, Any]:
    return {"node": name, "host": name, "pid": pid, "failure": None, "paths": paths}


def path(state: str, position: int, tentative: int | None = None, *waiting: str) -> dict[str, Any]:
    return {
        "state": state, "position": position, "tentative_upto": tentative,
        "waiting_for": [*waiting], "ended": False, "all_complete_upto": position,
    }  # fmt: skip


def contract(**changes: Any) -> dict[str, Any]:
    body = {
        "position": now(), "delay_ms": 312.0, "within": "3s", "kept": True, "breaks": 0,
        "worst_ms": 0.0, "broken_for_ms": None, "waiting_for": [], "lost_buckets": 0,
        "breaks_of": {"within": 0, "loss": 0}, "not_judged": None,
    }  # fmt: skip
    return body | changes


def shown(body: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    show_status(body, as_json=False)
    return capsys.readouterr().out


def rows_of(text: str) -> dict[str, list[str]]:
    """The words of the first line that begins with each name."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if words := line.split():
            rows.setdefault(words[0], words)
    return rows


def test_processes_are_shown_with_their_pids(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(status(nodes=[node("main", 4712)]), capsys)
    assert text.startswith("network netmon: running, deployment processes, pid 4711, ")
    assert "host main: 1 restart\n" in text
    assert "host spare: standby, pid 4713" in text


def test_positions_are_times_of_day_and_nothing_is_cut_off_at_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = now()
    body = status(
        sources={"tap-of-berlin": source(last), "gone": source(last - 40)},
        nodes=[
            node("main", 4712, top=path("UP_FAILURE", last - 40, last - 1, "gone")),
            node("main@2", 4713, top=path("STABILIZATION", last - 40, last - 1)),
            node("main@3", 4714, top=path("STABLE", last, None, "gone")),
        ],
        contracts={
            "top": contract(kept=False, breaks=1, broken_for_ms=2_500.0, waiting_for=["gone"])
        },
    )
    text = shown(body, capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    rows = rows_of(text)
    assert rows["gone"][1] == at(last - 40) and rows["gone"][3] == "s"
    assert 20 <= float(rows["gone"][2]) < 22
    assert rows["main"][1:4] == ["4712", "INPUT", "MISSING"]
    assert rows["main"][4] == at(last - 40) and rows["main"][-1] == "gone"
    assert rows["tentative"][1] == at(last - 1)
    assert rows["main@2"][2] == "CORRECTING" and rows["main@3"][2:4] == ["STABLE", at(last)]
    assert rows["main@3"][-1] == "-", "a healthy node waits only for the next bucket"
    assert rows["top"][1] == at(last) and rows["top"][4:6] == ["0.3", "s"]
    assert "within 3s: BROKEN for 2.5s" in " ".join(text.split())


def test_several_paths_and_shared_hosts_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    last = now()
    paths = {"windows": path("STABLE", last), "totals": path("STABILIZATION", last - 3)}
    nodes = [node(f"sums.{n}", 1_234_567, **paths) | {"host": f"h{n}"} for n in range(3)]
    text = shown(status(nodes=nodes), capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count("CATCHING UP") == 3 and text.count(at(last - 3)) == 3


def test_a_node_without_a_position_shows_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    grpc = "Flight error: gRPC returned unavailable error, with message: failed to connect"
    part = {
        "part": "main", "what": "host", "host": "main", "state": "restarting", "kind": "killed",
        "reason": "the process was terminated by SIGKILL", "failures": 1, "remedy": "none",
        "quarantined": False, "out": False, "final": False, "for_ms": 400, "retry_in_ms": 1_000,
    }  # fmt: skip
    nodes = [
        {"node": "main", "host": "main", "pid": None, "failure": grpc},
        {"node": "main@2", "host": "main@2", "pid": 4713, "failure": grpc},
        {"node": "main@3", "host": "main@3", "pid": 4714},
    ]
    text = shown(status(nodes=nodes, unhealthy=[part]), capsys)
    rows = rows_of(text)
    assert rows["main"][1:3] == ["-", "restarting"]
    assert rows["main@2"][1:4] == ["4713", "no", "answer"]
    assert rows["main@3"][1:3] == ["4714", "starting"]
    assert "gRPC" not in text
    assert "host main restarting for 0 s, next restart in 1 s: the process was terminated" in text


def test_the_lag_of_a_replay_is_relative_to_its_newest_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(
        status(
            sources={"old": source(1_000), "done": source(1_000, ended=True)},
            nodes=[node("main", 4712, top=path("STABLE", 990))],
        ),
        capsys,
    )
    rows = rows_of(text)
    assert rows["old"][1].startswith("19") and rows["old"][3:5] == ["0.0", "s"]
    assert rows["main"][5:7] == ["5.0", "s"]
    assert rows["done"][3] == "ended"


def test_failures_are_shown_once_with_their_dependent_outputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "path 'out', buckets 1 to 1: KeyError: 'page', at /srv/app.py:7 in parse"
    failure = {
        "node": "main", "outputs": ["out", "other"], "message": text, "permanent": True,
        "user_location": "/srv/app.py:7 in parse", "at": 0, "remedy": "Correct the function",
    }  # fmt: skip
    retried = failure | {"node": "second", "outputs": [], "permanent": False, "remedy": None}
    body = status(failures=[failure, retried], nodes=[{"node": "main", "failure": text}])
    lines = shown(body, capsys)
    assert f"node main failed (needed by out, other): {text}. Correct the function\n" in lines
    assert f"node second cannot continue and retries: {text}\n" in lines
    assert lines.count("KeyError") == 2


def test_a_failed_node_and_its_stopped_output_are_shown_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the local deployment, a failed node still reports its last position."""
    parse = node("parse", 4712, parsed=path("STABLE", now(), None, "s"))
    part = {
        "part": "parse", "what": "node", "host": "local", "state": "quarantined", "out": True,
        "for_ms": 3_000.0, "failures": 1, "retry_in_ms": None, "reason": "ValueError: x",
        "remedy": "correct the function",
    }  # fmt: skip
    failure = {
        "node": "parse", "outputs": ["parsed"], "message": "ValueError: x", "permanent": True,
        "user_location": None, "at": 0, "remedy": "Correct the function",
    }  # fmt: skip
    body = status(
        nodes=[parse | {"failure": "ValueError: x"}], unhealthy=[part], failures=[failure],
        stopped={"parsed": "node 'parse' failed"},
        contracts={"parsed": contract(), "other": contract(within=None)},
    )  # fmt: skip
    text = shown(body, capsys)
    rows = rows_of(text)
    assert "quarantined" in rows["parse"] and "STABLE" not in rows["parse"]
    assert rows["parsed"][-1] == "STOPPED"
    assert rows["other"][-1] == "-"
    assert text.count("ValueError") == 1


@pytest.mark.parametrize(
    ("steps", "apart_ms", "line"),
    [
        (0, 0.0, None),
        (0, 2_300.0, "source tap: the source clock is 2.3 s ahead of the wall clock"),
        (1, 0.0, "source tap: the wall clock stepped 1 time"),
        (2, -500.0, "source tap: the wall clock stepped 2 times; the source clock is 0.5 s behind "
                    "the wall clock"),
    ],
)  # fmt: skip
def test_steps_of_the_wall_clock_are_shown(
    steps: int, apart_ms: float, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    tap = source(now()) | {"clock_steps": steps, "clock_apart_ms": apart_ms}
    lines = shown(status(sources={"tap": tap}), capsys).splitlines()
    assert [text for text in lines if "clock" in text] == ([] if line is None else [line])


def test_a_recovery_that_takes_longer_than_stated_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = {
        "recovery_ms_stated": 2_000, "recovery_ms_last": 19_713, "recovery_ms_predicted": 1_900,
        "recovery_ms_fixed": 900,
    }  # fmt: skip
    late = path("STABLE", now()) | {"footprints": slow}
    text = shown(status(nodes=[node("main", 4712, top=late)]), capsys)
    assert "node main, path top: the last recovery took 19.7 s; recovery_time is 2 s" in text
    later = slow | {"recovery_ms_last": None, "recovery_ms_predicted": 4_900}
    text = shown(
        status(nodes=[node("main", 4712, top=path("STABLE", now()) | {"footprints": later})]),
        capsys,
    )
    assert "path top: a recovery now is predicted to take 4.9 s; recovery_time is 2 s" in text
    fixed = path("STABLE", now()) | {"footprints": slow | {"recovery_ms_fixed": 2_500}}
    text = shown(status(nodes=[node("main", 4712, top=fixed)]), capsys)
    assert "recovery_time is 2 s, but 2.5 s are fixed: state a longer time" in text
    for other in (None, slow | {"recovery_ms_last": None}, slow | {"recovery_ms_stated": None}):
        calm = path("STABLE", now()) | {"footprints": other}
        assert "recovery" not in shown(status(nodes=[node("main", 4712, top=calm)]), capsys)


def test_restamped_rows_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for count, rows in ((1, "1 late or future row was"), (7, "7 late or future rows were")):
        tap = source(now()) | {"restamped_rows": count}
        text = shown(status(sources={"tap": tap}), capsys)
        assert f"source tap: {rows} given a new time (late='restamp')" in text


def test_a_broken_contract_is_summed_up_at_the_end_of_a_run() -> None:
    late = contract(breaks=1, worst_ms=210.4, breaks_of={"within": 1, "loss": 0})
    assert broken_text("top", late) == "top: contract broken once; buckets up to 210 ms overdue"
    both = contract(breaks=3, worst_ms=210.4, lost_buckets=7, breaks_of={"within": 2, "loss": 1})
    assert broken_text("top", both) == (
        "top: contract broken 3 times; buckets up to 210 ms overdue, 7 buckets lost"
    )


def test_a_node_that_has_unprocessed_inputs_waits_for_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    behind = path("STABILIZATION", now() - 100, None, "tap9")
    assert "tap9" in shown(status(nodes=[node("main", 4712, top=behind)]), capsys)
    catching_up = behind | {"all_complete_upto": now() - 1}
    assert "tap9" not in shown(status(nodes=[node("main", 4712, top=catching_up)]), capsys)
