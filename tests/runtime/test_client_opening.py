"""Several clients of one output: each has its own name and position. No JVM: a script replaces the
host and sends its heartbeats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.errors import InputError
from holdfast.model.loading import load

APP = """
import holdfast as hf
net = hf.Network("clicks", bucket="500ms")
clicks = net.source("clicks", "ts timestamp, page string", time="ts")
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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hf.Run]:
    app, host, python = tmp_path / "app.py", tmp_path / "host.py", tmp_path / "python"
    app.write_text(APP)
    host.write_text(HOST)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {host} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    storage = str(tmp_path / "data")
    with hf.run(load(str(app)), storage=storage, deployment="processes", app=str(app)) as started:
        yield started


def test_named_clients_have_separate_folders_and_statuses(run: hf.Run) -> None:
    clients = [run.client("pages"), run.client("pages", name="bob")]
    assert [client.name for client in clients] == ["client-pages", "client-pages+bob"]
    folders = sorted(path.name for path in Path(run.storage, "clients").iterdir())
    assert folders == ["pages", "pages+bob"]
    assert list(run.status()["clients"]) == ["pages", "pages+bob"]


def test_a_second_client_of_the_same_name_is_refused_with_the_remedy(run: hf.Run) -> None:
    run.client("pages")
    bob = run.client("pages", name="bob")
    with pytest.raises(InputError, match=r"already has a client of 'pages'; .* its own name="):
        run.client("pages")
    with pytest.raises(InputError, match="already has a client of 'pages' with name='bob'"):
        run.client("pages", name="bob")
    bob.close()
    assert run.client("pages", name="bob").name == bob.name


def test_clients_that_are_not_durable_need_no_name(run: hf.Run) -> None:
    """They only watch: the position of the durable client does not depend on them."""
    names = [run.client("pages", durable=False).name for _ in range(3)]
    assert names == ["client-pages~1", "client-pages~2", "client-pages~3"]
    assert not run.service.consumers.get("pages", set()) & set(names)
    assert run.client("pages").name == "client-pages"


def test_client_names_that_are_not_valid_file_names_are_refused(run: hf.Run) -> None:
    with pytest.raises(InputError, match="expected letters, digits"):
        run.client("pages", name="../bob")
