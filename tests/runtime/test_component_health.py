"""What a run tells of hosts and nodes that are not healthy: in its status and in its metrics."""

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


def status(kind: Kind, reason: str, failures: int = 1) -> PartStatus:
    part = Quarantine()
    for second in range(failures):
        part.handle(Tick(1_000_000 * 100 * second))
        part.handle(Failed(1_000_000 * 100 * second, kind, reason))
    assert part.condition is not None
    return part.condition.status(1_000_000 * 100 * failures)


class Story:
    """Every node on a host of its own, as it tells of itself."""

    def __init__(self, folder: Path) -> None:
        self.net, self.told = network(), dict[str, dict[str, PartStatus]]()
        hosts = ("first", "first@2", "second")
        processes = {
            host: HostProcess("app.py", host, str(folder), "", Options(), lambda host: None)
            for host in hosts
        }
        self.differs: dict[str, list[str]] = {}
        self.parts = Parts(
            self.net, processes, lambda host: [host], lambda host: self.told.get(host, {}),
            lambda: self.differs,
        )  # fmt: skip
        watching = Monitor(self.net, fragments(self.net), {}, {}, [], [])
        self.metrics = Metrics(watching, {}, {}, {}, self.parts)

    def is_out(self, node: str, kind: Kind = "refused") -> None:
        self.told[node] = {node: status(kind, f"{node} holds another query", failures=20)}


def test_a_bad_replica_is_named_with_what_to_do_and_stops_no_output(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.is_out("first@2")
    (told,) = story.parts.status()
    assert (told["part"], told["what"], told["host"]) == ("first@2", "node", "first@2")
    assert told["state"] == "quarantined" and told["kind"] == "refused"
    assert "another query" in told["reason"] and "holdfast restart" in told["remedy"]
    assert story.parts.stopped() == {}
    assert story.parts.settled("first@2") and not story.parts.settled("first")


def test_only_the_output_without_a_replica_stops_and_says_why(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.is_out("second")
    assert list(story.parts.stopped()) == ["far"]
    assert "node second quarantined: second holds another query" in story.parts.stopped()["far"]
    assert list(story.parts.gone(final=True)) == ["second"]
    for node in ("first", "first@2"):
        story.is_out(node, "storage")
    assert sorted(story.parts.stopped()) == ["far", "near"]
    assert list(story.parts.gone(final=True)) == ["second"], "storage may be repaired"


def test_metrics_tell_of_bad_parts_and_stopped_outputs(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.is_out("second", "storage")
    sample = story.metrics.registry.get_sample_value
    labels = {"what": "node", "part": "second", "host": "second", "kind": "storage",
              "state": "quarantined"}  # fmt: skip
    assert sample("holdfast_part_unhealthy", labels) == 1
    assert sample("holdfast_part_failures", {"what": "node", "part": "second"}) == 20
    assert sample("holdfast_output_stopped", {"output": "far"}) == 1
    assert sample("holdfast_output_stopped", {"output": "near"}) == 0


def test_replicas_that_differ_are_counted(tmp_path: Path) -> None:
    story = Story(tmp_path)
    assert story.metrics.registry.get_sample_value("holdfast_replica_differs") is None
    story.differs["first@2"] = ["bucket 7 of 'near' was made otherwise"]
    told = story.metrics.registry.get_sample_value("holdfast_replica_differs", {"node": "first@2"})
    assert told == 1


def test_in_one_process_a_failed_node_is_named_and_stops_the_outputs_of_its_fragment() -> None:
    net = network()
    failures = Failures(net, local=True)
    parts = Parts(net, {}, lambda host: [], lambda host: {}, failures=failures)
    assert parts.status() == [] and parts.stopped() == {}
    failures.report("second", UserFunctionError("ValueError: negative, at app.py:7 in f"))
    (told,) = parts.status()
    assert (told["part"], told["what"], told["host"]) == ("second", "node", "local")
    assert told["out"] and told["final"] and told["state"] == "quarantined"
    assert "app.py:7" in told["reason"] and "start the run again" in told["remedy"]
    (why,) = (parts.stopped()["far"],)
    assert list(parts.stopped()) == ["far"] and "node 'second' failed: ValueError" in why
    watching = Monitor(net, fragments(net), {}, {}, [], [])
    registry = Metrics(watching, {}, {}, {}, parts).registry
    gone = {o: registry.get_sample_value("holdfast_output_stopped", {"output": o})
            for o in ("near", "far")}  # fmt: skip
    assert gone == {"near": 0.0, "far": 1.0}
