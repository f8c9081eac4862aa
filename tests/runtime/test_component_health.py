"""Unhealthy hosts and nodes in the status and in the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import holdfast as hf
from holdfast.cluster.supervisor import HostProcess
from holdfast.config import Options
from holdfast.core.quarantine import Failed, Kind, PartStatus, Quarantine, Tick
from holdfast.errors import UserFunctionError
from holdfast.model.fragments import fragments
from holdfast.runtime.component_health import Parts
from holdfast.runtime.contracts import Monitor
from holdfast.runtime.failures import Failures
from holdfast.runtime.metrics import Metrics


def network() -> hf.Network:
    """Two outputs; only one of them needs the node `second`."""
    net = hf.Network("two", bucket="100ms")
    rows = net.source("s", "ts timestamp, x double", time="ts", clock="manual")
    first = rows.on("first").filter("x > 0")
    net.output("near", first)
    net.output("far", first.on("second").filter("x > 1"))
    net.protect("first", replicas=2)
    return net


def status(kind: Kind, reason: str, host: str, failures: int = 1) -> PartStatus:
    part = Quarantine()
    for second in range(failures):
        part.handle(Tick(1_000_000 * 100 * second))
        part.handle(Failed(1_000_000 * 100 * second, kind, reason))
    assert part.condition is not None
    return part.condition.status(1_000_000 * 100 * failures, host)


class Story:
    """Every node on its own host, with the health that the host reports."""

    def __init__(self, folder: Path) -> None:
        self.net, self.reported = network(), dict[str, dict[str, PartStatus]]()
        hosts = ("first", "first@2", "second")
        processes = {
            host: HostProcess("app.py", host, str(folder), "", Options(), lambda host: None)
            for host in hosts
        }
        self.differs: dict[str, list[str]] = {}
        self.recovery_ms: dict[str, dict[str, int]] = {}
        self.parts = Parts(
            self.net, processes, lambda host: [host], lambda host: self.reported.get(host, {}),
            lambda: self.differs, lambda: self.recovery_ms,
        )  # fmt: skip
        monitor = Monitor(self.net, fragments(self.net), {}, {}, [], [])
        self.metrics = Metrics(monitor, {}, {}, {}, self.parts)

    def is_out(self, node: str, kind: Kind = "refused") -> None:
        self.reported[node] = {node: status(kind, f"{node} holds another query", node, failures=20)}


def test_an_unhealthy_replica_is_reported_with_its_remedy_and_stops_no_output(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path)
    story.is_out("first@2")
    (component,) = story.parts.status()
    assert (component["part"], component["what"], component["host"]) == (
        "first@2",
        "node",
        "first@2",
    )
    assert component["state"] == "quarantined" and component["kind"] == "refused"
    assert "another query" in component["reason"]
    assert "holdfast restart --host first@2`" in component["remedy"]
    assert story.parts.stopped() == {}
    assert story.parts.settled("first@2") and not story.parts.settled("first")


def test_only_the_output_without_a_replica_stops_with_the_reason(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.is_out("second")
    assert list(story.parts.stopped()) == ["far"]
    assert "node second quarantined: second holds another query" in story.parts.stopped()["far"]
    assert list(story.parts.gone(final=True)) == ["second"]
    for node in ("first", "first@2"):
        story.is_out(node, "storage")
    assert sorted(story.parts.stopped()) == ["far", "near"]
    assert list(story.parts.gone(final=True)) == ["second"], (
        "a storage failure is not final: the storage may be repaired"
    )


def test_metrics_report_unhealthy_components_and_stopped_outputs(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.is_out("second", "storage")
    sample = story.metrics.registry.get_sample_value
    labels = {"what": "node", "part": "second", "host": "second", "kind": "storage",
              "state": "quarantined"}  # fmt: skip
    assert sample("holdfast_part_unhealthy", labels) == 1
    assert sample("holdfast_part_failures", {"what": "node", "part": "second"}) == 20
    assert sample("holdfast_output_stopped", {"output": "far"}) == 1
    assert sample("holdfast_output_stopped", {"output": "near"}) == 0


def test_metrics_report_predicted_recoveries_of_nodes_in_other_processes(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.recovery_ms = {"first": {"main": 1_500}}
    labels = {"node": "first", "path": "main"}
    assert story.metrics.registry.get_sample_value("holdfast_path_recovery_seconds", labels) == 1.5


def test_metrics_count_replicas_that_differ(tmp_path: Path) -> None:
    story = Story(tmp_path)
    assert story.metrics.registry.get_sample_value("holdfast_replica_differs") is None
    story.differs["first@2"] = ["bucket 7 of 'near' differs between replicas"]
    count = story.metrics.registry.get_sample_value("holdfast_replica_differs", {"node": "first@2"})
    assert count == 1


def test_in_one_process_a_failed_node_is_reported_and_stops_the_outputs_of_its_fragment() -> None:
    net = network()
    failures = Failures(net, local=True)
    parts = Parts(net, {}, lambda host: [], lambda host: {}, failures=failures)
    assert parts.status() == [] and parts.stopped() == {}
    failures.report("second", UserFunctionError("ValueError: negative, at app.py:7 in f"))
    (component,) = parts.status()
    assert (component["part"], component["what"], component["host"]) == ("second", "node", "local")
    assert component["out"] and component["final"] and component["state"] == "quarantined"
    assert "app.py:7" in component["reason"] and "start the run again" in component["remedy"]
    (reason,) = (parts.stopped()["far"],)
    assert list(parts.stopped()) == ["far"] and "node 'second' failed: ValueError" in reason
    monitor = Monitor(net, fragments(net), {}, {}, [], [])
    registry = Metrics(monitor, {}, {}, {}, parts).registry
    stopped = {o: registry.get_sample_value("holdfast_output_stopped", {"output": o})
            for o in ("near", "far")}  # fmt: skip
    assert stopped == {"near": 0.0, "far": 1.0}
