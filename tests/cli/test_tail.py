"""`holdfast tail` while the producer dies, deletes buckets and restarts. No JVM."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.tail import tail
from holdfast.errors import HoldfastError, InputError, SetupError
from holdfast.storage import Log
from holdfast.streams.calls import GetProducers, Locate, Location, Producers
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightServer
from tests.transport.test_contract import SCHEMA, correct, put, write_tentative

LIMIT_S = 20.0


class Producer:
    """A run with one node, which produces `s` and may be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log_folder = folder, folder / "log"
        self.chief = Service()
        self.reported = True
        self.chief.handle(GetProducers, lambda ask: Producers(("main",), ask.stream == "s", ("s",)))
        self.chief.handle(
            Locate, lambda ask: Location(self.server.address if self.reported else None)
        )
        self._chief_server = FlightServer(self.chief)
        (folder / "run.json").write_text(json.dumps({"address": self._chief_server.address}))
        self.come_up()

    def come_up(self) -> None:
        self.log = Log.open(self._log_folder, "main", fsync="never")
        if not self.log.streams():
            self.log.open_stream("s", SCHEMA, "ts", 0)
        self.service = Service(logs={"s": self.log}, trim_buckets=1)
        self.server = FlightServer(self.service)

    def die(self) -> None:
        self.server.stop()
        self.log.close()

    def end(self) -> None:
        self.die()
        self._chief_server.stop()


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Producer]:
    producer = Producer(tmp_path)
    yield producer
    producer.end()


class Printed(io.StringIO):
    """Captured output; each write wakes the threads that wait for text."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()

    def write(self, text: str) -> int:
        with self._news:
            self._news.notify_all()
            return super().write(text)

    def buckets(self) -> list[int]:
        """The bucket of every first row."""
        return [int(ln.split()[0]) for ln in self.getvalue().splitlines() if ln.endswith("value=0")]

    def shows(self, bucket: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: bucket in self.buckets(), LIMIT_S), self.getvalue()

    def says(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: text in self.getvalue(), LIMIT_S), self.getvalue()


class Tailing(threading.Thread):
    def __init__(self, producer: Producer, monkeypatch: pytest.MonkeyPatch, buckets: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._buckets = str(producer.folder), buckets
        self.out, self.err = Printed(), Printed()
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setattr(sys, "stderr", self.err)
        self.failure: HoldfastError | None = None
        self.start()

    def run(self) -> None:
        try:
            tail(self._folder, "s", False, self._buckets, True)
        except HoldfastError as err:
            self.failure = err

    def ends(self) -> None:
        self.join(LIMIT_S)
        assert not self.is_alive()


def test_tail_continues_with_a_restarted_producer(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(producer.log, 0)
    tailing = Tailing(producer, monkeypatch, buckets=3)
    tailing.out.shows(0)
    producer.die()
    producer.come_up()
    put(producer.log, 1)
    tailing.out.shows(1)
    put(producer.log, 2)
    tailing.ends()
    assert (
        tailing.out.buckets() == [0, 1, 2]
        and tailing.failure is None
        and tailing.err.getvalue() == ""
    )


def test_tail_reports_buckets_that_were_deleted_before_they_were_shown(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(producer.log, 0)
    tailing = Tailing(producer, monkeypatch, buckets=2)
    tailing.out.shows(0)
    producer.die()
    producer.come_up()
    producer.server.stop()  # no consumer reads meanwhile
    for bucket in (1, 2, 3):
        put(producer.log, bucket)
    producer.log.trim("s", 2)
    producer.server = FlightServer(producer.service)
    tailing.ends()
    assert tailing.out.buckets() == [0, 3]
    assert tailing.err.getvalue() == "buckets 1 to 2 were deleted before they could be shown\n"


def test_tail_shows_a_tentative_bucket_once_and_again_when_it_is_corrected(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(producer.log, 0)
    write_tentative(producer.log, 1, 2, 1, 2)
    tailing = Tailing(producer, monkeypatch, buckets=5)
    tailing.out.shows(2)
    correct(producer.log, 1)
    write_tentative(producer.log, 3, 3, 3)
    tailing.ends()
    firsts = [" ".join(line.split()[:2]) for line in tailing.out.getvalue().splitlines()
              if line.endswith("value=0")]  # fmt: skip
    assert firsts == ["0 STABLE", "1 TENTATIVE", "2 TENTATIVE", "1 STABLE", "3 TENTATIVE"]


def test_tail_shows_that_a_tentative_bucket_is_empty_after_its_correction(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(producer.log, 0)
    write_tentative(producer.log, 1, 2, 1, 2)
    tailing = Tailing(producer, monkeypatch, buckets=5)
    tailing.out.shows(2)
    correct(producer.log, 1, 2)  # bucket 1 has no rows
    tailing.ends()
    lines = tailing.out.getvalue().splitlines()
    corrected = lines[lines.index(next(line for line in lines if line.startswith("2 TENT"))) :]
    assert any(line.startswith("1 STABLE") for line in corrected)


def test_tail_ends_with_the_run(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    put(producer.log, 0)
    tailing = Tailing(producer, monkeypatch, buckets=2)
    tailing.out.shows(0)
    (producer.folder / "run.json").unlink()
    producer.server.stop()
    tailing.ends()
    assert isinstance(tailing.failure, SetupError) and "no run is using" in str(tailing.failure)


def test_tail_refuses_an_unknown_output(producer: Producer) -> None:
    with pytest.raises(InputError, match=r"there is no output 'nope' \(outputs: s\)"):
        tail(str(producer.folder), "nope", False, 1, False)


def test_tail_waits_while_the_run_is_starting(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.reported = False
    tailing = Tailing(producer, monkeypatch, buckets=1)
    tailing.err.says("waiting for 's': the run is starting")
    put(producer.log, 0)
    producer.reported = True
    tailing.ends()
    assert tailing.out.buckets() == [0] and tailing.failure is None


def test_tail_does_not_wait_for_a_run_that_has_stopped(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.reported = False
    tailing = Tailing(producer, monkeypatch, buckets=1)
    tailing.err.says("waiting for")
    (producer.folder / "run.json").unlink()
    tailing.ends()
    assert isinstance(tailing.failure, SetupError) and "no run is using" in str(tailing.failure)
