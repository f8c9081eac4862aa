"""Which outputs a failure stops: those that need a component without a replica left."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf
from holdfast.edge.client import Client
from holdfast.edge.source import Source
from holdfast.errors import InputError, UserFunctionError
from holdfast.runtime.failures import Failures
from holdfast.storage import Log
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess

SCHEMA = "ts timestamp, key string, x long"


def chain(**second: object) -> hf.Network:
    """`a` and `b` -> first -> second -> `deep`; `b` -> third -> `apart`."""
    net = hf.Network("chain", bucket="1s")
    a, b = (net.source(name, SCHEMA, time="ts") for name in ("a", "b"))
    both = a.union(b).on("first").filter("x > 0")
    deep = both.on("second")
    if second:
        deep = deep.union(b.on("second"))
    net.output("deep", deep.filter("x > 1"), contract=hf.Contract(within="5s"))
    net.output("apart", b.on("third").filter("x > 2"))
    net.protect("first", replicas=2)
    if second:
        net.protect("second", **second)
    return net


def reason_of(failures: Failures, output: str, **options: bool) -> str:
    return str(failures.lost(output, **options) or "")


def test_an_output_stops_with_the_last_replica_of_a_fragment_that_it_needs() -> None:
    failures = Failures(chain(), local=False)
    failures.report("first", InputError("a refused plan"))
    assert failures.lost("deep") is None
    failures.report("first@2", InputError("a full disk"))
    assert "node 'first@2' failed: a full disk. Fix the cause" in reason_of(failures, "deep")
    assert failures.lost("apart") is None
    assert [(f.node, f.outputs) for f in failures.all()] == [
        ("first", ("deep",)), ("first@2", ("deep",))
    ]  # fmt: skip


def test_in_one_process_there_are_no_replicas() -> None:
    failures = Failures(chain(), local=True)
    failures.report("first", InputError("gone"))
    assert reason_of(failures, "deep").startswith(
        "output 'deep' gives no more results: node 'first' f"
    )


def test_a_failure_that_is_retried_stops_no_output() -> None:
    failures = Failures(chain(), local=True)
    failure = failures.report("first", InputError("a full disk"), permanent=False)
    assert failures.lost("deep") is None
    assert failure.text() == "node 'first' cannot continue and retries: a full disk"
    assert failure.body()["remedy"] is None


def test_a_failure_of_a_host_says_how_to_restart_that_host() -> None:
    failures = Failures(chain(), local=False)
    advice = "fix the cause, then run `holdfast restart --host h1`"
    failure = failures.report("second", "a refused plan", advice=advice)
    assert failure.text() == f"node 'second' failed: a refused plan. F{advice[1:]}"
    assert failure.body()["remedy"] == failure.remedy
    raised = failures.report("second", "ValueError, at app.py:7 in f", advice=advice)
    assert raised.remedy.startswith("Correct the function and start the run again with another")


def test_a_failure_ends_when_a_newer_instance_has_registered() -> None:
    epochs = {"second": 1}
    failures = Failures(chain(), local=False, epoch=lambda node: epochs.get(node, 0))
    failures.report("second", InputError("gone"))
    assert failures.lost("deep") is not None
    epochs["second"] = 2
    assert failures.lost("deep") is None
    assert failures.all() == []


def test_each_replica_of_a_clusters_replication_fails_as_a_unit() -> None:
    """`clusters`: a replica of the dataflow that has lost a node is useless."""
    net = hf.Network("clusters", bucket="1s")
    rows = net.source("a", SCHEMA, time="ts").on("one").filter("x > 0")
    net.output("out", rows.on("two").filter("x > 1"))
    for fragment in ("one", "two"):
        net.protect(fragment, replicas=2, replication="clusters")
    failures = Failures(net, local=False)
    failures.report("one", InputError("gone"))
    assert failures.lost("out") is None
    failures.report("two@2", InputError("gone"))
    assert failures.lost("out") is not None


def test_a_fragment_that_continues_without_an_input_serves_clients_of_tentative_results() -> None:
    failures = Failures(chain(on_failure="process"), local=True)
    failures.report("first", InputError("gone"))
    assert failures.lost("deep", tentative=True) is None
    assert failures.lost("deep") is not None
    failures.report("source b", InputError("gone"))  # now no input is left
    assert failures.lost("deep", tentative=True) is not None


def test_a_source_refuses_rows_that_no_consumer_would_read() -> None:
    failures = Failures(chain(), local=True)
    failures.report("second", InputError("gone"))
    assert "source 'a' accepts no more rows" in str(failures.unread("a"))
    assert failures.unread("b") is None  # `apart` reads it
    failures.report("third", InputError("gone"))
    assert failures.unread("b") is not None


def test_a_failed_feed_stops_the_outputs_that_depend_on_it() -> None:
    failures = Failures(chain(), local=False)
    failures.report("source a", ValueError("no such file"))
    assert "source 'a' failed: ValueError: no such file. Report this bug" in reason_of(
        failures, "deep"
    )
    assert failures.lost("apart") is None


@pytest.mark.parametrize("as_error", [True, False], ids=["error", "text of another process"])
def test_the_users_line_is_reported_once_and_as_a_separate_field(as_error: bool) -> None:
    location = "/srv/app.py:7 in parse"
    error = UserFunctionError(
        f"path 'deep', buckets 1 to 1: KeyError: 'page', at {location}", location
    )
    failures = Failures(chain(), local=True)
    failures.report("second", error if as_error else f"host 'second' stopped: {error}")
    (failure,) = failures.all()
    assert failure.user_location == location
    lost = failures.lost("deep")
    assert lost is not None and lost.location == location
    assert lost.__cause__ is (error if as_error else None)
    assert str(lost).count(location) == 1
    assert ". Correct the function and start the run again with another storage" in str(lost)


def test_a_bug_in_holdfast_is_not_blamed_on_the_user() -> None:
    failures = Failures(chain(), local=True)
    error = AssertionError("shards")
    error.__traceback__ = None
    failures.report("second", error)
    (failure,) = failures.all()
    assert failure.user_location is None
    assert "AssertionError: shards. Report this bug in Holdfast" in failure.text()


def test_status_reports_failures_that_a_node_retries() -> None:
    """Such as a full disk or a failed tentative step, as the node reports it."""
    failures = Failures(chain(), local=True)
    (failure,) = failures.troubles(
        [{"node": "second", "trouble": "KeyError: 'a', at /srv/app.py:7 in f"}, {"node": "third"}]
    )
    assert failure.body() == {
        "node": "second", "outputs": ["deep"], "message": "KeyError: 'a', at /srv/app.py:7 in f",
        "user_location": "/srv/app.py:7 in f", "at": failure.at, "permanent": False,
        "remedy": None,
    }  # fmt: skip


def test_clients_and_sources_of_the_run_are_notified(tmp_path: Path) -> None:
    """Those that exist at the failure: a run opens its sources and clients later."""
    net, clients, sources, logs = chain(), list[Client](), dict[str, Source](), dict[str, Log]()
    failures = Failures(net, local=True, clients=clients, sources=sources, logs=logs)
    for op in net.sources:
        logs[op.name] = Log.open(tmp_path / op.name, op.name, fsync="never")
        sources[op.name] = Source(op, logs[op.name], net.width_us)
    service = Service(logs=logs)
    logs["deep"] = Log.open(tmp_path / "second", "second", fsync="never")
    logs["deep"].open_stream("deep", SCHEMA, "ts", 0)
    logs["deep"].commit("deep", [], 4)
    for name in ("deep", "apart"):
        clients.append(Client(name, {name: lambda: InProcess(service)}, net.width_us))
    failures.report("second", InputError("a refused plan"))
    with pytest.raises(hf.NodeFailed, match="source 'a' accepts no more rows"):
        sources["a"].push([])
    sources["b"].push([])
    with pytest.raises(hf.NodeFailed, match="output 'deep' gives no more results"):
        list(clients[0])
    assert clients[0].position == 4  # the client received all readable buckets
    assert not clients[1].closed
    failures.recovered("second")
    sources["a"].push([])
    for log in logs.values():
        log.close()
