"""Contracts monitored in real runs: violations and their end are reported."""

from __future__ import annotations

import logging
import queue
import shutil
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli.show import contract_word
from holdfast.clock import now_us
from holdfast.core.contract_monitor import Action, Broken, Kept
from holdfast.engine.session import Sessions
from holdfast.errors import InputError, SetupError
from holdfast.runtime.folders import node_folder

LIMIT_S = 60.0
WIDTH_US = 200_000
SCHEMA = "ts timestamp, x double"


class Tap:
    """A row every 20 milliseconds of real time, until the tap is closed."""

    def __init__(self) -> None:
        self.flows = threading.Event()
        self.flows.set()
        self.stamps_us: list[int] = []
        self.feed = hf.Generate(self._make, every_ms=20)

    def _make(self, number: int, from_us: int, to_us: int) -> dict[str, Any]:
        self.flows.wait(LIMIT_S)  # the feed drives the clock of its source, which stops too
        self.stamps_us.append(from_us)
        return {"ts": [from_us], "x": [float(number)]}


def network(taps: list[Tap], within: str) -> hf.Network:
    net = hf.Network("promises", bucket="200ms")
    sources = [
        net.source(f"tap{number}", SCHEMA, time="ts", feed=tap.feed)
        for number, tap in enumerate(taps)
    ]
    both = net.union(*sources).filter("x >= 0")
    net.output("rows", both, contract=hf.Contract(within=within))
    return net


class Hearing:
    """All actions of the monitor, with their times."""

    def __init__(self, run: hf.Run) -> None:
        self._run = run
        self.reports: queue.Queue[tuple[int, Action]] = queue.Queue()
        run.on_contract.append(lambda action: self.reports.put((now_us(), action)))

    def next(self) -> tuple[int, Action]:
        try:
            return self.reports.get(timeout=LIMIT_S)
        except queue.Empty:
            self._run.raise_failure()
            raise AssertionError(f"the monitor reported nothing: {self._run.status()}") from None


class Reading:
    """A client in a separate thread."""

    def __init__(self, run: hf.Run) -> None:
        self._buckets = threading.Semaphore(0)
        self._client = run.client("rows")
        self._thread = threading.Thread(
            target=self._client.foreach_bucket, args=(lambda *_: self._buckets.release(),)
        )
        self._thread.start()

    def wait_buckets(self, count: int) -> None:
        for _ in range(count):
            assert self._buckets.acquire(timeout=LIMIT_S)

    def close(self) -> None:
        self._client.close()
        self._thread.join(LIMIT_S)


def scrape(run: hf.Run) -> dict[str, float]:
    assert run.metrics.url is not None
    with urllib.request.urlopen(run.metrics.url, timeout=LIMIT_S) as response:
        lines = response.read().decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in samples}


def test_ecoc_2_5_lide_a_stopped_source_breaks_the_contract_and_is_reported(
    sessions: Sessions, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    within_us = 3_000_000  # shorter limits are exceeded on busy machines without any fault
    taps = [Tap(), Tap()]
    caplog.set_level(logging.WARNING, "holdfast.monitor")
    with hf.run(network(taps, "3s"), options=hf.Options(metrics_port=0)) as run:
        hearing, reading = Hearing(run), Reading(run)
        reading.wait_buckets(10)
        taps[1].flows.clear()
        reported_us, broken = hearing.next()
        status, metrics = run.status(), scrape(run)
        taps[1].flows.set()
        _, kept = hearing.next()
        after, metrics_after = run.status(), scrape(run)
        reading.close()

    # Reported on time: the first row of the bucket broke the contract.
    assert isinstance(broken, Broken)
    assert (broken.output, broken.promise) == ("rows", "within")
    due_us = (broken.bucket + 1) * WIDTH_US + within_us
    first_stamp_us = min(us for us in taps[0].stamps_us if us // WIDTH_US == broken.bucket)
    first_broken_us = first_stamp_us + within_us
    step_us = int(status["nodes"][0]["step_ms"] * 1_000)
    with capsys.disabled():
        print(
            f"\nmonitor: reported {(reported_us - first_broken_us) / 1_000:.1f} ms after the first "
            f"row was late, {(reported_us - due_us) / 1_000:.1f} ms after its bucket was overdue "
            f"(bucket {WIDTH_US / 1_000:.0f} ms, step {step_us / 1_000:.0f} ms)"
        )
    assert due_us <= broken.at <= reported_us
    assert reported_us - first_broken_us <= WIDTH_US + step_us

    # Reported in status, metrics and log, with the source that is waited for.
    contract = status["contracts"]["rows"]
    assert (contract["within"], contract["kept"], contract["breaks"]) == ("3s", False, 1)
    assert contract["broken_since_us"] == due_us
    assert contract["overdue_ms"] >= 0
    assert contract["waiting_for"] == ["tap1"]
    assert contract_word(contract).startswith("BROKEN for ")
    assert contract_word(contract).endswith("s: waiting for tap1")
    assert metrics['holdfast_contract_kept{output="rows"}'] == 0
    assert metrics['holdfast_contract_breaks_total{output="rows",promise="within"}'] == 1
    assert metrics['holdfast_position_bucket{output="rows"}'] == broken.bucket - 1
    assert metrics['holdfast_source_closed_bucket{source="tap1"}'] == broken.bucket - 1
    assert metrics['holdfast_source_closed_bucket{source="tap0"}'] >= broken.bucket
    assert metrics['holdfast_node_steps_total{node="main"}'] > 0
    assert metrics['holdfast_delay_seconds{output="rows"}'] > 0
    line, line_after = caplog.messages
    assert line.startswith(f"output rows: contract BROKEN (within 3s): bucket {broken.bucket} ")
    assert line.endswith(f"client has received buckets up to {broken.bucket - 1}, waiting for tap1")

    # The end of the violation is reported too.
    assert isinstance(kept, Kept)
    assert kept.bucket > broken.bucket
    contract = after["contracts"]["rows"]
    assert (contract["kept"], contract["broken_since_us"], contract["breaks"]) == (True, None, 1)
    assert contract["worst_ms"] > 0
    assert contract_word(contract) == "kept"
    assert metrics_after['holdfast_contract_kept{output="rows"}'] == 1
    assert metrics_after['holdfast_contract_breaks_total{output="rows",promise="within"}'] == 1
    assert "contract kept again (within 3s), was broken for" in line_after
    assert hearing.reports.empty()


def test_the_monitor_is_silent_without_failures(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast.monitor")
    with hf.run(network([Tap(), Tap()], "3s")) as run:
        assert run.metrics.url is None  # metrics are not served by default
        hearing, reading = Hearing(run), Reading(run)
        reading.wait_buckets(20)
        contract = run.status()["contracts"]["rows"]
        reading.close()
    assert hearing.reports.empty()
    assert caplog.messages == []
    assert (contract["kept"], contract["breaks"], contract["worst_ms"]) == (True, 0, 0)
    assert contract["not_judged"] is None


def test_ecoc_2_5_lilo_buckets_deleted_before_delivery_are_a_loss(
    tmp_path: Path, sessions: Sessions
) -> None:
    """A client stops early, the node continues, its inputs are trimmed, its disk is lost."""

    def make() -> hf.Run:
        net = hf.Network("lossy", bucket="200ms")
        source = net.source("s", SCHEMA, time="ts", clock="manual")
        net.output("rows", source.filter("x >= 0"), contract=hf.Contract(within="1s"))
        options = hf.Options(recovery="checkpoint", checkpoint_buckets=1, archive=False)
        return hf.run(net, storage=str(tmp_path), options=options)

    def push(run: hf.Run, bucket: int) -> None:
        run.source("s").push({"ts": [bucket * WIDTH_US], "x": [1.0]})
        run.source("s").advance((bucket + 1) * WIDTH_US)

    with make() as run:
        reading = Reading(run)
        push(run, 0)
        reading.wait_buckets(1)
        reading.close()
        for bucket in range(1, 20):
            push(run, bucket)
        log = run.source("s").log
        with log.changed:
            assert log.changed.wait_for(lambda: log.info("s").trimmed_upto > 0, LIMIT_S)
        assert (
            run.status()["contracts"]["rows"]["not_judged"] == "a source's clock is manual or data"
        )
    shutil.rmtree(node_folder(str(tmp_path), "main"))
    with make() as run:
        hearing, log = Hearing(run), run.nodes["main"].log
        with log.changed:
            assert log.changed.wait_for(lambda: "rows" in log.streams(), LIMIT_S)
            assert log.changed.wait_for(lambda: log.info("rows").trimmed_upto > 0, LIMIT_S)
            lost_upto = log.info("rows").trimmed_upto
        client = run.client("rows")
        assert client.position == 0
        _, lost = hearing.next()
        contract = run.status()["contracts"]["rows"]
    assert isinstance(lost, Broken)
    assert (lost.promise, lost.bucket) == ("loss", 1)
    assert lost.why == f"buckets 1 to {lost_upto} were deleted before the client received them"
    assert contract_word(contract) == f"BROKEN {lost_upto} buckets lost"
    assert hearing.reports.empty()


def test_a_used_port_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = hf.run(network([Tap(), Tap()], "1s"), options=hf.Options(metrics_port=port))
        with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{port} .*--metrics-port"):
            run.start()
    assert run.nodes == {}
    with pytest.raises(InputError, match="metrics_port: 70000 is not a port"):
        hf.Options(metrics_port=70_000)
