"""Runs without a JVM: a script replaces the host and sends its heartbeats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.model.loading import load

APP = """
import holdfast as hf
def rows(number, from_us, to_us):
    return {"ts": [from_us], "page": ["/"]}
net = hf.Network("clicks", bucket="500ms")
clicks = net.source("clicks", "ts timestamp, page string", time="ts", feed=FEED)
net.output("pages", clicks.filter("page <> ''"))
"""
HOST = """
import sys, threading
from holdfast.core.membership import process_of
from holdfast.model.identity import identity_of
from holdfast.model.loading import load
from holdfast.model.partitions import physical
from holdfast.streams.calls import Instance, NextEpoch, Register
from holdfast.transport.flight import FlightPeer
app, host, _, supervisor, _ = sys.argv[-5:]
chief, identity = FlightPeer(supervisor), identity_of(physical(load(app)))
epoch = chief.call(NextEpoch(process_of(host), identity=identity)).epoch
node = Instance(host, "127.0.0.1:1", chief.call(NextEpoch(host)).epoch)
while not threading.Event().wait(0.2):
    chief.call(Register(host, epoch, (node,), {}))
"""


#: Starts a run on the same storage as the runs before.
Starter = Callable[..., hf.Run]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starter:
    app, host, python = tmp_path / "app.py", tmp_path / "host.py", tmp_path / "python"
    host.write_text(HOST)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {host} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def start(*, feed: bool = False) -> hf.Run:
        app.write_text(APP.replace("FEED", "hf.Generate(rows)" if feed else "None"))
        storage = str(tmp_path / "data")
        return hf.run(load(str(app)), storage=storage, deployment="processes", app=str(app))

    return start


@pytest.fixture
def run(started: Starter) -> Iterator[hf.Run]:
    with started() as run:
        yield run
