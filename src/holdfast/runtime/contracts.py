"""Watches the contracts of the outputs while the network runs, and reports broken promises.

One thread checks the positions of the consumers of each output, passes them to
`core.contract_monitor`, and reports its decisions to the log, to the program's callbacks and to
`status`. The thread checks once per bucket, and also when the next bucket becomes overdue.

The consumers are the clients of the run. If no client has begun to read, the log of the node is
checked instead, provided the node runs in this process. An output of another process without a
client here is not judged: asking a hung node would delay the check exactly when the answer matters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.clock import now_us
from holdfast.core import contract_monitor as core
from holdfast.edge.client import Client
from holdfast.edge.source import Source
from holdfast.model.fragments import Fragment
from holdfast.model.network import Network
from holdfast.model.operators import Output, sources_of
from holdfast.types import StreamInfo, bucket_end_us

if TYPE_CHECKING:
    from holdfast.node.node import Node

_log = logging.getLogger("holdfast.monitor")
#: Minimum interval between two checks; narrower buckets are not checked one by one.
_LOOK_US_MIN = 20_000


@dataclass(slots=True)
class _Watched:
    op: Output
    #: The fragment and the path that produce the output.
    fragment: str
    path: str
    sources: tuple[str, ...]
    #: Every source closes buckets by a real clock, so that delays are meaningful.
    real_time: bool
    watched: bool = False
    #: Position of the slowest client, or of the node if no client reads.
    upto: int | None = None
    #: From the end of the last known bucket to the check that found it.
    delay_us: int | None = None


class Monitor:
    """Contract monitor of one run. It reads the collections of the run, which grow meanwhile."""

    def __init__(
        self,
        network: Network,
        fragments: Sequence[Fragment],
        sources: Mapping[str, Source],
        nodes: Mapping[str, Node],
        clients: Sequence[Client],
        listeners: Sequence[Callable[[core.Action], None]],
    ) -> None:
        self._width_us = network.width_us
        self._sources, self._nodes, self._clients, self._listeners = (
            sources,
            nodes,
            clients,
            listeners,
        )
        producers = {
            stream: (fragment.name, path.name)
            for fragment in fragments
            for path in fragment.paths
            for stream in path.outputs
        }
        self._outputs = {op.name: _watched(op, *producers[op.name]) for op in network.outputs}
        #: Guards the core, which the checking thread updates and other threads query.
        self._lock = threading.Lock()
        self._core = core.Monitor(
            network.width_us, {name: _promised(output) for name, output in self._outputs.items()}
        )

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            now = now_us()
            due = self.look(now)
            wait_us = max(self._width_us, _LOOK_US_MIN)
            if due is not None:
                wait_us = min(wait_us, due - now)
            # Wait slightly longer: the timer and the wall clock are different clocks.
            stop.wait(wait_us / 1e6 + 0.0002)

    def look(self, now: int) -> int | None:
        """Pass the positions to the core before the time, so that a bucket that a client already
        has is not overdue. Returns when the next check is due."""
        actions: list[core.Action] = []
        with self._lock:
            for output in self._outputs.values():
                for event in self._seen(now, output):
                    actions += self._core.handle(event)
            actions += self._core.handle(core.Tick(now))
            due = self._core.next_due(now)
        for action in actions:
            self._report(action)
        return due

    def contracts(self) -> dict[str, dict[str, Any]]:
        """Status of the contract of every output."""
        now = now_us()
        return {name: self._contract(now, output) for name, output in self._outputs.items()}

    def text(self, action: core.Action) -> str:
        """The action as one line of text."""
        contract, output = self._outputs[action.output].op.contract, f"output {action.output}"
        promise = f"{action.promise} {getattr(contract, action.promise)}"
        match action:
            case core.Broken(promise="within"):
                overdue = f"bucket {action.bucket} is {action.overdue_us / 1_000:.1f} ms overdue"
                return f"{output}: contract BROKEN ({promise}): {overdue}; {action.why}"
            case core.Broken():
                return f"{output}: contract BROKEN ({promise}): {action.why}"
            case core.Kept():
                return (
                    f"{output}: contract kept again ({promise}), was broken for "
                    f"{action.broken_for_us / 1e6:.1f} s; received up to bucket {action.bucket}"
                )

    # -- checking ---------------------------------------------------------------------------------

    def _seen(self, now: int, output: _Watched) -> list[core.Event]:
        name = output.op.name
        # Read the log before the clients: a client has every bucket that it acknowledged and that
        # was therefore trimmed.
        logged = self._logged(output)
        reading = [c for c in list(self._clients) if c.output == name and not c.closed]
        ended = bool(reading) and all(client.ended for client in reading)
        positions = [client.known_upto for client in reading if client.known_upto is not None]
        if not reading and output.fragment not in self._nodes:
            was_watched, output.watched = output.watched, False
            return [core.Ended(now, name)] if was_watched else []
        events: list[core.Event] = []
        if not output.watched:
            output.watched = True
            events.append(core.Began(now, name))
        if positions:
            upto = min(positions)
            if logged is not None and logged.trimmed_upto > max(upto, logged.starts_at - 1):
                events.append(core.Gap(now, name, upto + 1, logged.trimmed_upto))
        elif logged is not None:
            upto, ended = logged.complete_upto, logged.ended
        else:
            return events
        if upto != output.upto:
            output.upto = upto
            if output.real_time:
                output.delay_us = now - bucket_end_us(upto, self._width_us)
        events.append(core.Known(now, name, upto))
        return [*events, core.Ended(now, name, whole=True)] if ended else events

    def _logged(self, output: _Watched) -> StreamInfo | None:
        node = self._nodes.get(output.fragment)
        name = output.op.name
        return node.log.info(name) if node is not None and node.log.has(name) else None

    def _waiting_for(self, output: _Watched, bucket: int) -> list[str]:
        """The cause of the delay of a bucket: the sources that have not closed it; else the client,
        if the node has computed it; else the missing inputs of the node; else the node itself."""
        behind = [name for name in output.sources if not _closed(self._sources[name], bucket)]
        node, logged = self._nodes.get(output.fragment), self._logged(output)
        if behind or node is None:
            return behind or [f"node {output.fragment}"]
        if logged is not None and logged.complete_upto >= bucket:
            return ["its client"]
        path = node.status()["paths"][output.path]
        if path["all_complete_upto"] is None or path["all_complete_upto"] < bucket:
            return list(path["waiting_for"])
        return [f"node {output.fragment}"]

    # -- reporting --------------------------------------------------------------------------------

    def _report(self, action: core.Action) -> None:
        if isinstance(action, core.Broken) and action.promise == "within":
            waiting = ", ".join(self._waiting_for(self._outputs[action.output], action.bucket))
            action = replace(action, why=f"{action.why}, waiting for {waiting}")
        # The same level for broken and kept promises, so that a log shows both or neither.
        _log.warning("%s", self.text(action))
        for callback in list(self._listeners):
            try:
                callback(action)
            except Exception:
                _log.exception("a callback of on_contract failed")

    def _contract(self, now: int, output: _Watched) -> dict[str, Any]:
        with self._lock:
            status = self._core.status(output.op.name, now)
        since, missing = status.broken_since_us, status.missing
        return {
            "within": output.op.contract.within,
            "kept": status.kept,
            "broken_since_us": since,
            "broken_for_ms": None if since is None else max(0, now - since) / 1_000,
            "overdue_ms": status.overdue_us / 1_000,
            "waiting_for": []
            if missing is None or since is None
            else self._waiting_for(output, missing),
            "breaks": sum(status.breaks.values()),
            "breaks_of": status.breaks,
            "worst_ms": status.worst_us / 1_000,
            "lost_buckets": status.lost_buckets,
            "position": output.upto,
            "delay_ms": None if output.delay_us is None else output.delay_us / 1_000,
            "not_judged": self._not_judged(output),
        }

    def _not_judged(self, output: _Watched) -> str | None:
        """Why the delay is not judged; None if it is."""
        if output.op.contract.within is None:
            return "no delay is promised"
        if not output.real_time:
            return "a source's clock is manual or data"
        return None if output.watched else "no client reads the output in this process"


def _watched(op: Output, fragment: str, path: str) -> _Watched:
    sources = sources_of(op)
    real_time = all(source.clock in ("wall", "live") for source in sources)
    return _Watched(op, fragment, path, tuple(source.name for source in sources), real_time)


def _closed(source: Source, bucket: int) -> bool:
    if not source.opened:
        return False
    info = source.log.info(source.name)
    return info.ended or info.complete_upto >= bucket


def _promised(output: _Watched) -> core.Promised:
    contract = output.op.contract
    return core.Promised(contract.within_us if output.real_time else None, contract.loss == 0.0)
