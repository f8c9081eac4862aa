"""Admission to a run: only hosts with the same query, code and libraries. No JVM."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cluster import host_main
from holdfast.cluster.controller import Controller, process_of
from holdfast.cluster.controller_service import ControllerService
from holdfast.core.quarantine import EXIT_CODES
from holdfast.errors import IdentityMismatch, InputError
from holdfast.model.identity import identity_of
from holdfast.model.layout import Layout
from holdfast.storage import Log
from holdfast.streams.calls import NextEpoch
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess


def network(condition: str = "n > 0") -> hf.Network:
    net = hf.Network("net")
    tap = net.source("tap", "ts timestamp, n long", time="ts")
    net.output("out", tap.filter(condition).apply(lambda df: df.select("ts", "n")))
    return net


def test_a_host_with_another_query_gets_no_epoch_and_the_other_hosts_continue(
    tmp_path: Path,
) -> None:
    """B6: the host is refused before any consumer can read a row from it."""
    log = Log.open(str(tmp_path), "controller", fsync="never")
    layout: Layout = {"main": ("main",), "main@2": ("main@2",)}
    controller = Controller(log, layout=layout, identity=identity_of(network()))
    service = Service()
    ControllerService(controller, service, ["out"])

    def ask(host: str, net: hf.Network) -> int:
        process = process_of(host)
        return InProcess(service).call(NextEpoch(process, identity=identity_of(net))).epoch

    assert ask("main", network()) == 1
    with pytest.raises(IdentityMismatch) as refused:
        ask("main@2", network("n > 1"))
    message = str(refused.value)
    assert "\n" not in message, "a host prints the message as its last line"
    assert "host 'main@2'" in message and "filter-1: condition 'n > 0' -> 'n > 1'" in message
    assert controller.refused("main@2") == message
    assert log.counter("epoch.process.main@2") == 0
    assert not controller.here("main@2", 0, at=1), "a host without an epoch cannot register"
    assert controller.refused("main") is None and controller.here("main", 1, at=1)
    assert ask("main@2", network()) == 1, "the host is admitted after its query was restored"
    assert controller.refused("main@2") is None


def test_a_host_with_other_libraries_is_refused(tmp_path: Path) -> None:
    log = Log.open(str(tmp_path), "controller", fsync="never")
    controller = Controller(log, layout={"main": ("main",)}, identity=identity_of(network()))
    ours = identity_of(network())
    other = replace(ours, libraries={**ours.libraries, "pyarrow": "0.1"})
    with pytest.raises(IdentityMismatch, match=r"library: pyarrow \S+ -> 0.1"):
        controller.admit("main", other)


def test_a_process_without_an_identity_gets_no_epoch(tmp_path: Path) -> None:
    log = Log.open(str(tmp_path), "controller", fsync="never")
    service = Service()
    layout: Layout = {"main": ("main",)}
    ControllerService(Controller(log, layout=layout, identity=identity_of(network())), service, [])
    chief = InProcess(service)
    with pytest.raises(InputError, match="expected the identity of host 'main'"):
        chief.call(NextEpoch(process_of("main")))
    assert chief.call(NextEpoch("main")).epoch == 1, (
        "a node needs no identity: its process was admitted before"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_option": 1}, "unknown: new_option; missing: none"),
        ({"fsync": None}, "unknown: none; missing: fsync"),
    ],
)
def test_options_of_another_version_are_reported_and_not_retried(
    change: dict[str, int | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C14: the code of the host was replaced on disk while the supervisor was running."""
    options = {k: v for k, v in (asdict(hf.Options()) | change).items() if k not in change or v}
    argv = ["app.py", "main", "folder", "127.0.0.1:1", json.dumps(options)]
    assert host_main.main(argv) == EXIT_CODES["refused"]
    assert message in capsys.readouterr().err
    assert host_main.main(argv[:-1]) == EXIT_CODES["refused"]
    assert "4 arguments of another version" in capsys.readouterr().err
