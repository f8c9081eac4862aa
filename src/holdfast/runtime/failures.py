"""Failures of a run, and the outputs that they stop.

Nodes, clients and background threads such as feeds report their failures here. `lost` answers the
question of clients, pushers and commands: does every component that an output needs still have a
replica? Only if not, the output stops, and all waiting callers receive the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from holdfast.clock import now_us
from holdfast.edge.client import Client
from holdfast.edge.source import Source
from holdfast.engine.user_errors import location_in, location_of
from holdfast.errors import HoldfastError, NodeFailed
from holdfast.model.fragments import fragment_of, fragments, producers_for, producers_of
from holdfast.model.network import Network
from holdfast.storage import Log

#: Cache of one query: why each node gives no results any more; None: the node works.
Known = dict[str, "Failure | None"]


@dataclass(frozen=True, slots=True)
class Failure:
    #: The failed component: a node (`main@2`), or `source tap0`, `client top`, `thread monitor`.
    node: str
    #: The outputs that depend on the component. They stop only if no replica of it is left.
    outputs: tuple[str, ...]
    message: str
    #: `FILE:LINE in FUNCTION` of the application, if one of its functions raised the error.
    user_location: str | None
    #: Microseconds since 1970.
    at: int
    #: False: the component retries, and the failure ends when a retry succeeds.
    permanent: bool
    error: BaseException | None = field(default=None, repr=False, compare=False)
    #: What to do, if the reporter knows it.
    advice: str | None = None

    @property
    def kind(self) -> str:
        return self.node.rpartition(" ")[0] or "node"

    def body(self) -> dict[str, Any]:
        """The failure as `status` reports it."""
        return {
            "node": self.node,
            "outputs": list(self.outputs),
            "message": self.message,
            "user_location": self.user_location,
            "at": self.at,
            "permanent": self.permanent,
            "remedy": self.remedy if self.permanent else None,
        }

    def text(self) -> str:
        """One line: the component, the error, and what to do next."""
        component = f"{self.kind} {self.node.rpartition(' ')[2]!r}"
        if not self.permanent:
            return f"{component} cannot continue and retries: {self.message}"
        return f"{component} failed: {self.message.rstrip('.')}. {self.remedy}"

    @property
    def remedy(self) -> str:
        """What to do about a permanent failure."""
        ours = self.error is not None and not isinstance(self.error, HoldfastError)
        if self.user_location is not None and self.kind == "node":
            return (
                "Correct the function and start the run again with another storage: a changed "
                "query cannot continue on the old storage"
            )
        if self.user_location is not None:
            return "Correct the function and start the run again"
        if ours:
            return "Report this bug in Holdfast with its log, and start the run again"
        if self.advice is not None:
            return self.advice[0].upper() + self.advice[1:]
        return "Fix the cause and start the run again"


class Failures:
    """The failures of one run: the newest failure of each component. Thread-safe. It reads the
    collections of the run, which grow meanwhile."""

    def __init__(
        self,
        network: Network,
        *,
        local: bool,
        epoch: Callable[[str], int] = lambda node: 0,
        clients: Sequence[Client] = (),
        sources: Mapping[str, Source] = MappingProxyType({}),
        logs: Mapping[str, Log] = MappingProxyType({}),
    ) -> None:
        """`epoch`: the epoch of the newest instance of a node. `logs`: the logs of this process,
        which remain readable after their producer has failed."""
        self._network, self._local, self._epoch = network, local, epoch
        self._clients, self._pushed, self._logs = clients, sources, logs
        self._sources = {op.name for op in network.sources}
        self._inputs = {part.name: part.inputs for part in fragments(network)}
        #: The components that each output depends on: nodes, sources, and its client.
        self._needs = {op.name: self._members(op.name) for op in network.outputs}
        self._lock = threading.RLock()
        #: The newest failure of each component, with the epoch of the failed instance.
        self._held: dict[str, tuple[Failure, int]] = {}

    def report(
        self,
        node: str,
        error: BaseException | str,
        *,
        permanent: bool = True,
        user_location: str | None = None,
        advice: str | None = None,
    ) -> Failure:
        """Report a failure. It remains valid until a newer instance of the component registers, or
        until `recovered` is called."""
        failure = self._made(node, error, permanent, user_location, advice)
        with self._lock:
            self._held[node] = failure, self._epoch(node)
        self.tell()
        return failure

    def recovered(self, node: str) -> None:
        """The same instance works again."""
        with self._lock:
            self._held.pop(node, None)
        self.tell()

    def all(self) -> list[Failure]:
        """All failures that are still valid, oldest first."""
        with self._lock:
            lasting = [failure for node in self._held if (failure := self._of(node)) is not None]
        return sorted(lasting, key=lambda failure: failure.at)

    def lost(self, output: str, *, tentative: bool = False) -> NodeFailed | None:
        """Why an output gives no more results: a component that it needs has no replica left. A
        client that accepts tentative results is still served while each fragment that may continue
        without missing inputs has at least one input left."""
        with self._lock:
            failure = self._gone(output, f"client-{output}", tentative, {})
        return (
            None if failure is None else _error(f"output {output!r} gives no more results", failure)
        )

    def why_lost(self, output: str) -> str | None:
        """The failure behind `lost`, as one line."""
        with self._lock:
            failure = self._gone(output, f"client-{output}", False, {})
        return None if failure is None else failure.text()

    def stopped(self, output: str) -> NodeFailed | None:
        """Like `lost`, but also if the client of the output in this process failed."""
        with self._lock:
            client_failure = self._ended(f"client {output}")
        if client_failure is None:
            return self.lost(output)
        return _error(f"output {output!r} is no longer read", client_failure)

    def unread(self, source: str) -> NodeFailed | None:
        """Why the rows of a source reach no output any more."""
        outputs = [name for name, members in self._needs.items() if member(source) in members]
        with self._lock:
            causes = [self._gone(name, f"client-{name}", True, {}) for name in outputs]
        failures = [failure for failure in causes if failure is not None]
        if not failures or len(failures) < len(causes):
            return None
        return _error(
            f"source {source!r} accepts no more rows: no consumer of it is left", failures[0]
        )

    def tell(self) -> None:
        """Notify clients of lost outputs and pushers whose rows reach only lost outputs. A client
        first receives the buckets that are still readable."""
        for client in list(self._clients):
            output = client.output
            if (error := self.lost(output, tentative=client.tentative)) is not None:
                log = self._logs.get(output)
                opened = log is not None and log.has(output)
                client.fail(error, log.info(output).complete_upto if log and opened else None)
        for name, source in self._pushed.items():
            source.failure = self.unread(name)

    def troubles(self, nodes: Iterable[Mapping[str, Any]]) -> list[Failure]:
        """Temporary failures from the status of nodes: problems that currently prevent progress and
        that the nodes retry automatically."""
        return [
            self._made(node["node"], node["trouble"], False)
            for node in nodes
            if node.get("trouble") is not None
        ]

    # -- inside -----------------------------------------------------------------------------------

    def _made(
        self,
        node: str,
        error: BaseException | str,
        permanent: bool,
        user_location: str | None = None,
        advice: str | None = None,
    ) -> Failure:
        message, cause, location = str(error), None, user_location
        if isinstance(error, BaseException):
            cause, location = error, location or location_of(error)
            if not isinstance(error, HoldfastError):
                message = f"{type(error).__name__}: {error}"
        location = location or location_in(message)
        message = " ".join(message.split())
        if location is not None and location not in message:
            message = f"{message}, at {location}"
        outputs = tuple(name for name, members in self._needs.items() if node in members)
        return Failure(node, outputs, message, location, now_us(), permanent, cause, advice)

    def _members(self, output: str) -> set[str]:
        nodes_of, members = producers_of(self._network), {f"client {output}"}
        streams = [output]
        while streams:
            stream = streams.pop()
            producers = {member(stream)} if stream in self._sources else {*nodes_of[stream]}
            if not producers <= members:
                members |= producers
                if stream not in self._sources:
                    streams += self._inputs[fragment_of(nodes_of[stream][0])]
        return members

    def _of(self, node: str) -> Failure | None:
        if node not in self._held:
            return None
        failure, epoch = self._held[node]
        return None if self._epoch(node) > epoch else failure

    def _gone(self, stream: str, consumer: str, tentative: bool, cache: Known) -> Failure | None:
        """Why no producer of a stream is left for `consumer`: the failure of the last producer."""
        if not self._held:  # the common case, in the loop of every waiting caller
            return None
        if stream in self._sources:
            return self._ended(member(stream))
        producers = producers_for(self._network, stream, consumer)[: 1 if self._local else None]
        for producer in producers:
            if producer not in cache:
                cache[producer] = self._stopped(producer, tentative, cache)
        failures = [failure for producer in producers if (failure := cache[producer]) is not None]
        return (
            max(failures, key=lambda failure: failure.at)
            if len(failures) == len(producers)
            else None
        )

    def _stopped(self, node: str, tentative: bool, cache: Known) -> Failure | None:
        """Why a node gives no results any more: the node failed, or an input that it needs is
        gone."""
        if (failure := self._ended(node)) is not None:
            return failure
        inputs = self._inputs[fragment_of(node)]
        lost_inputs = [
            cause for name in inputs if (cause := self._gone(name, node, tentative, cache))
        ]
        may_continue = (
            tentative and self._network.protection(fragment_of(node)).on_failure != "block"
        )
        return (
            lost_inputs[0]
            if lost_inputs and not (may_continue and len(lost_inputs) < len(inputs))
            else None
        )

    def _ended(self, node: str) -> Failure | None:
        failure = self._of(node)
        return failure if failure is not None and failure.permanent else None


def member(source: str) -> str:
    """Component name of a source; the prefix distinguishes it from a node of the same name."""
    return f"source {source}"


def _error(effect: str, failure: Failure) -> NodeFailed:
    error = NodeFailed(f"{effect}: {failure.text()}", failure.user_location)
    error.__cause__ = failure.error
    return error
