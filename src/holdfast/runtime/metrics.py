"""Metrics of a run in the Prometheus format.

Metrics keep no counters of their own: each scrape reads the values where they are maintained. Each
run has its own registry, which a program may serve itself; `Options.metrics_port` serves it on
`/metrics`. Nodes in other processes are not asked for values, because a hung node would delay every
scrape. Metrics of other processes contain only values that this process already has: restarts,
and what heartbeats report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.cluster.supervisor import HostProcess
from holdfast.edge.source import Source
from holdfast.errors import SetupError
from holdfast.runtime.component_health import Parts
from holdfast.runtime.contracts import Monitor
from holdfast.types import OutputState

if TYPE_CHECKING:
    from holdfast.node.node import Node


class Metrics(Collector):
    def __init__(
        self,
        monitor: Monitor,
        sources: Mapping[str, Source],
        nodes: Mapping[str, Node],
        processes: Mapping[str, HostProcess],
        parts: Parts,
    ) -> None:
        self._monitor, self._sources = monitor, sources
        self._nodes, self._processes, self._parts = nodes, processes, parts
        self.registry = CollectorRegistry()
        self.registry.register(self)
        #: URL of the metrics; None if they are not served.
        self.url: str | None = None

    def serve(self, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as err:
            raise SetupError(
                f"cannot serve metrics on {host}:{port} ({err}); is the port in use? choose "
                "another metrics_port (--metrics-port), or 0 for any free one"
            ) from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        if self.url is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=10)
            self.url = None

    def collect(self) -> Iterator[Metric]:
        yield from self._of_outputs()
        yield from self._of_sources()
        yield from self._of_nodes()
        yield from self._of_parts()

    def _of_outputs(self) -> Iterator[Metric]:
        kept = _gauge("contract_kept", "1 while all promises of the output are kept", "output")
        breaks = _counter("contract_breaks", "Times a promise was broken", "output", "promise")
        delay = _gauge("delay_seconds", "From the end of the last bucket to its delivery", "output")
        position = _gauge("position_bucket", "The last bucket its slowest client has", "output")
        for output, contract in self._monitor.contracts().items():
            if _judged(contract):
                kept.add_metric([output], contract["kept"])
            for promise, count in contract["breaks_of"].items():
                breaks.add_metric([output, promise], count)
            if contract["delay_ms"] is not None:
                delay.add_metric([output], contract["delay_ms"] / 1_000)
            if contract["position"] is not None:
                position.add_metric([output], contract["position"])
        return iter((kept, breaks, delay, position))

    def _of_sources(self) -> Iterator[Metric]:
        closed = _gauge(
            "source_closed_bucket", "The last bucket that the source has closed", "source"
        )
        counted = {
            "rows": _counter("source_rows", "Rows that the source has accepted", "source"),
            "late_rows": _counter("source_late_rows", "Rows of closed buckets", "source"),
            "future_rows": _counter("source_future_rows", "Rows too far ahead", "source"),
            "null_time_rows": _counter("source_null_time_rows", "Rows without a time", "source"),
            "restamped_rows": _counter(
                "source_restamped_rows", "Late and future rows that were given a new time",
                "source",
            ),
            "clock_steps": _counter(
                "source_clock_steps", "Steps of the wall clock seen by the source", "source"
            ),
        }  # fmt: skip
        clock_apart = _gauge(
            "source_clock_apart_seconds", "Source clock minus wall clock", "source"
        )
        for name, source in list(self._sources.items()):
            status = source.status()
            for key, metric in counted.items():
                metric.add_metric([name], status[key])
            clock_apart.add_metric([name], status["clock_apart_ms"] / 1_000)
            if status["complete_upto"] is not None:
                closed.add_metric([name], status["complete_upto"])
        return iter((closed, *counted.values(), clock_apart))

    def _of_nodes(self) -> Iterator[Metric]:
        steps = _counter("node_steps", "Steps of the node", "node")
        seconds = _gauge("node_step_seconds", "Median of the last hundred steps", "node")
        checkpoints = _gauge(
            "node_checkpoint_seconds", "Median of the last hundred checkpoints", "node"
        )
        tentative = _counter("node_tentative_steps", "Steps on partial input", "node")
        states = _gauge("path_state", "1 for the state of the path", "node", "path", "state")
        recovery = _gauge(
            "path_recovery_seconds",
            "Predicted time of a recovery, with recovery='cec'",
            "node",
            "path",
        )
        predicted_ms = dict(self._parts.recovery_ms())
        for name, node in list(self._nodes.items()):
            status = node.status()
            steps.add_metric([name], status["steps"])
            if status["step_ms"] is not None:
                seconds.add_metric([name], status["step_ms"] / 1_000)
            if status["checkpoint_ms"] is not None:
                checkpoints.add_metric([name], status["checkpoint_ms"] / 1_000)
            tentative.add_metric([name], status["tentative_steps"])
            for path, path_status in status["paths"].items():
                for state in OutputState:
                    states.add_metric([name, path, state.value], path_status["state"] == state)
            predicted_ms[name] = node.performer.checkpoints.recovery_ms()
        for name, paths in predicted_ms.items():
            for path, ms in paths.items():
                recovery.add_metric([name, path], ms / 1_000)
        restarts = _counter("host_restarts", "Restarts of the process", "host")
        for name, process in list(self._processes.items()):
            restarts.add_metric([name], process.restarts)
        return iter((steps, seconds, checkpoints, tentative, states, recovery, restarts))

    def _of_parts(self) -> Iterator[Metric]:
        unhealthy = _gauge(
            "part_unhealthy", "1 for a host or node that is not healthy", "what", "part", "host",
            "kind", "state",
        )  # fmt: skip
        failures = _gauge("part_failures", "Failures in a row without progress", "what", "part")
        for part in self._parts.status():
            labels = [part[name] for name in ("what", "part", "host", "kind", "state")]
            unhealthy.add_metric(labels, 1)
            failures.add_metric([part["what"], part["part"]], part["failures"])
        output_stopped = _gauge("output_stopped", "1 if no replica of the output is left", "output")
        stopped = self._parts.stopped()
        for output in self._monitor.contracts():
            output_stopped.add_metric([output], output in stopped)
        differs = _gauge("replica_differs", "Streams that differ from other replicas", "node")
        for node, differences in self._parts.differs().items():
            differs.add_metric([node], len(differences))
        return iter((unhealthy, failures, output_stopped, differs))


def _judged(contract: Mapping[str, Any]) -> bool:
    """Whether the contract has a verdict: on the delay, or on losses if no delay is promised. An
    observed loss is always a verdict, even if no client reads any more."""
    delay_judged = contract["not_judged"] is None or contract["within"] is None
    return delay_judged or contract["breaks_of"]["loss"] > 0


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"holdfast_{name}", about, labels=labels)


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    """Prometheus appends `_total` to the name."""
    return CounterMetricFamily(f"holdfast_{name}", about, labels=labels)
