"""The chaos harness rejects impossible scenarios and detects violations. There is no Spark: the
query is the identity, so that the ideal equals the rows that the source logged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import chaos as command
from holdfast.clock import now_us
from holdfast.edge.client import Client
from holdfast.edge.source import Source
from holdfast.errors import InputError
from holdfast.model.operators import Source as SourceOperator
from holdfast.storage import Log
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess
from holdfast.verify.chaos import SCENARIOS, find
from holdfast.verify.chaos.deployed_networks import NETWORKS, SCHEMA
from holdfast.verify.chaos.process_faults import check as check_faults
from holdfast.verify.chaos.pusher import Pusher
from holdfast.verify.chaos.recorder import Recorder, record, rows_of
from holdfast.verify.checkers import check
from holdfast.verify.history import (
    Accepted,
    Began,
    Event,
    Finished,
    Given,
    History,
    Ideal,
    Logged,
    Made,
    Progressed,
    Promised,
    Stopped,
)
from holdfast.verify.scenario import parse_scenario

WIDTH_US = 50_000
BUCKETS = 8
LIMIT_S = 30.0


class Dropping(Client):
    """Loses one bucket before the application receives it, like a client with a bug."""

    given = 0

    def __next__(self) -> tuple[Any, Any]:
        self.given += 1
        delivery = super().__next__()
        return super().__next__() if self.given == 4 else delivery


def run(folder: Path, kind: type[Client]) -> History:
    """Returns the history of a source fed in real time and of its client."""
    recorder = Recorder()
    with closing(Log.open(folder, "s", fsync="never", archive=True)) as log:
        op = SourceOperator(name="s", schema=SCHEMA, time="ts", clock="live")
        source = Source(op, log, WIDTH_US)
        service = Service(logs={"s": log}, heartbeat_s=0.01)
        client = kind("s", {"s": lambda: InProcess(service)}, WIDTH_US, name="client")
        may_read = threading.Event()
        may_read.set()
        consumer = threading.Thread(target=record, args=(client, recorder, may_read), daemon=True)
        consumer.start()
        pusher = Pusher({"s": source}, WIDTH_US, recorder)
        first = now_us() // WIDTH_US + 1
        pusher.begin(first, seed=7)
        _until(lambda: source.opened and log.info("s").complete_upto >= first + BUCKETS)
        upto = pusher.rest()
        _until(lambda: client.position is not None and client.position >= upto)
        pusher.close()
        client.close()
        consumer.join()
        events: list[Event] = [
            Began(first * WIDTH_US, "identity", WIDTH_US, 10_000_000, 10_000_000, 100),
            Promised(first * WIDTH_US, "client", "s", ("s",)),
            *recorder.take(),
            Progressed(now_us(), "client", "s", upto),
        ]
        for segment in log.segments("s", first, upto):
            rows, bucket = rows_of(log.read(segment)), segment.id.bucket
            events.append(Logged(now_us(), "s", bucket, rows))
            events.append(Ideal((bucket + 1) * WIDTH_US, "s", bucket, rows))
        return History([*sorted(events, key=lambda e: e.at), Finished(now_us(), True)])


def _until(test: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failed(history: History) -> list[str]:
    return [verdict.checker for verdict in check(history) if verdict.outcome == "failed"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> History:
    return run(tmp_path_factory.mktemp("good"), Client)


def test_a_correct_run_passes(good: History) -> None:
    assert failed(good) == []
    assert len(list(good.of(Given))) > BUCKETS


def test_a_client_that_drops_a_bucket_fails_lost(tmp_path: Path) -> None:
    assert "lost" in failed(run(tmp_path, Dropping))


def _given(history: History) -> Given:
    return list(history.of(Given))[3]


def _without(history: History, event: Event) -> list[Event]:
    return [one for one in history.events if one is not event]


@pytest.mark.parametrize(
    ("tamper", "checker"),
    [
        (lambda h: _without(h, _given(h)), "lost"),
        (lambda h: [*h.events, _given(h)], "doubled"),
        (lambda h: [replace(e, rows=((0, 0, 0, 0), *e.rows[1:])) if e is _given(h) else e
                    for e in h.events], "wrong"),
        (lambda h: [*h.events, replace(_given(h), rows=())], "undone"),
        (lambda h: [*h.events, Progressed(h.events[-1].at, "client", "s", 0)], "order"),
        (lambda h: [*h.events, Accepted(h.events[-1].at, "s", ((1, 2, 3, 4),))], "accepted"),
        (lambda h: [*h.events, Stopped(h.events[-1].at, "node", "ours", "a bug")], "alive"),
        (lambda h: [*h.events, *(Made(h.events[-1].at, node, 1, "s", 5, "STABLE", node)
                                 for node in ("a", "b"))], "converge"),
    ],
    ids=["lost", "doubled", "wrong", "undone", "order", "accepted", "alive", "converge"],
)  # fmt: skip
def test_a_tampered_history_fails_the_checker(
    good: History, tamper: Callable[[History], list[Event]], checker: str
) -> None:
    assert checker in failed(History(tamper(good)))


def test_a_failure_is_reported_with_the_command_that_repeats_it(
    good: History, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = History(_without(good, _given(good)))
    monkeypatch.setattr(command, "_run", lambda scenario, say: (bad, "/where/it/ran"))
    assert command.run_chaos("kill", json_to=None, history_to=None) == 1
    output = capsys.readouterr().out
    assert "kill: failed (lost, contract)" in output
    assert "logs of the run: /where/it/ran" in output
    assert "repeat: holdfast chaos kill" in output


def test_a_history_can_be_written_and_read(good: History, tmp_path: Path) -> None:
    good.write(tmp_path / "history")
    assert History.read(tmp_path / "history").events == good.events


def test_a_silent_source_pushes_no_rows_for_the_time_of_its_silence(tmp_path: Path) -> None:
    recorder = Recorder()
    with closing(Log.open(tmp_path, "s", fsync="never", archive=True)) as log:
        op = SourceOperator(name="s", schema=SCHEMA, time="ts", clock="live")
        source = Source(op, log, WIDTH_US)
        pusher = Pusher({"s": source}, WIDTH_US, recorder)
        first = now_us() // WIDTH_US + 1
        pusher.begin(first, seed=1)
        _until(lambda: source.opened and log.info("s").complete_upto >= first + 1)
        pusher.silence("s")
        silent_from = log.info("s").complete_upto + 1
        _until(lambda: now_us() // WIDTH_US > silent_from + 3)
        assert log.info("s").complete_upto < silent_from + 1
        pusher.speak("s")
        spoke_at = now_us() // WIDTH_US
        _until(lambda: log.info("s").complete_upto >= spoke_at + 1)
        pusher.rest()
        pusher.close()
        buckets = {segment.id.bucket for segment in log.segments("s", first, 2**62)}
        assert not buckets & set(range(silent_from + 1, spoke_at - 1))
        assert spoke_at in buckets
        assert source.counters["late_rows"] == 0
        accepted = [row for event in recorder.take() if isinstance(event, Accepted)
                    for row in event.rows]  # fmt: skip
        assert len(accepted) == source.counters["rows"]


def fault(do: str, on: str, extra: str = "") -> str:
    body = f'[[fault]]\nat = "1s"\ndo = "{do}"\non = "{on}"\nfor = "1s"\n{extra}'
    return f'name = "bad"\nnetwork = "chain"\nseconds = 5\n{body}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fault("slow", "first", "value = 2"), "slow works only in the simulator"),
        (fault("kill", "s1"), "sources run in the process of the harness"),
        (fault("kill", "client"), "clients run in the process of the harness"),
        (fault("kill", "third"), "expected a node as the target, one of first, second"),
        (fault("replace", "controller"), "expected a node as the target, one of first, second"),
        (fault("silent", "first"), "expected a source as the target, one of s1, s2"),
        (fault("cut", "s1->second"), "there is no link between 's1' and 'second'"),
    ],
)
def test_a_fault_impossible_on_real_processes_is_rejected_before_the_start(
    text: str, message: str
) -> None:
    scenario = parse_scenario(text)
    with pytest.raises(InputError, match=message):
        check_faults(scenario, NETWORKS[scenario.network])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_built_in_scenarios_are_valid(name: str) -> None:
    scenario = find(name)
    assert scenario.name == name
    assert scenario.about
    check_faults(scenario, NETWORKS[scenario.network])


def test_find_reads_a_scenario_from_a_file() -> None:
    assert find(str(SCENARIOS["kill"])) == find("kill")
    with pytest.raises(InputError, match="there is no scenario 'nope'; there are: cut, kill"):
        find("nope")
    with pytest.raises(InputError, match="cannot be read"):
        find("nope.toml")
