"""What has failed in a run, and which outputs that stops.

Whoever notices a failure reports it here: a node of this process, the supervisor of a host, the
thread of a feed. `lost` is the one question that readers, pushers and commands ask: is a replica
left of everything that an output needs? Only if not does the output stop, and then it says why,
wherever somebody waits for it.
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

#: Why each node gives no results any more, as far as it was asked.
Known = dict[str, "Failure | None"]


@dataclass(frozen=True, slots=True)
class Failure:
    #: Who failed: a node (`main@2`), or `source tap0`, `host h1`, `client top`, `thread monitor`.
    node: str
    #: The outputs that depend on it. They stop only if no replica of it is left.
    outputs: tuple[str, ...]
    message: str
    #: `FILE:LINE in FUNCTION` of the application, where a function of it raised.
    user_location: str | None
    #: Microseconds since 1970.
    at: int
    #: False: it is tried again, and the failure ends when that succeeds.
    permanent: bool
    error: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        return self.node.rpartition(" ")[0] or "node"

    def body(self) -> dict[str, Any]:
        """As `status` gives it."""
        return {
            "node": self.node,
            "outputs": list(self.outputs),
            "message": self.message,
            "user_location": self.user_location,
            "at": self.at,
            "permanent": self.permanent,
        }

    def text(self) -> str:
        """One line: who, what, and what to do next."""
        who = f"{self.kind} {self.node.rpartition(' ')[2]!r}"
        if not self.permanent:
            return f"{who} has trouble and tries again: {self.message}"
        return f"{who} failed: {self.message.rstrip('.')}. {self.remedy}"

    @property
    def remedy(self) -> str:
        """What to do about one that is permanent."""
        ours = self.error is not None and not isinstance(self.error, HoldfastError)
        if self.user_location is not None and self.kind == "node":
            return (
                "Correct the function and start the run again, with another storage: a query that "
                "was changed does not go on with the old one"
            )
        if self.user_location is not None:
            return "Correct the function and start the run again"
        if ours:
            return "Report this fault of Holdfast with its log, and start the run again"
        return "Settle that and start the run again"


class Failures:
    """Of one run; the newest of each member. Any thread may report and ask. It reads the run's own
    collections, which grow while it does."""

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
        """`epoch`: of the newest instance of a node. `logs`: of what is made in this process, which
        can be read although whoever made it has failed."""
        self._network, self._local, self._epoch = network, local, epoch
        self._clients, self._pushed, self._logs = clients, sources, logs
        self._sources = {op.name for op in network.sources}
        self._inputs = {part.name: part.inputs for part in fragments(network)}
        #: What each output depends on: nodes, sources, and whoever reads it.
        self._needs = {op.name: self._members(op.name) for op in network.outputs}
        self._lock = threading.RLock()
        #: With the epoch of the instance that failed.
        self._held: dict[str, tuple[Failure, int]] = {}

    def report(
        self,
        node: str,
        error: BaseException | str,
        *,
        permanent: bool = True,
        user_location: str | None = None,
    ) -> Failure:
        """A member failed. That counts until a newer instance of it has registered."""
        failure = self._made(node, error, permanent, user_location)
        with self._lock:
            self._held[node] = failure, self._epoch(node)
        self.tell()
        return failure

    def recovered(self, node: str) -> None:
        """It works again, as the same instance."""
        with self._lock:
            self._held.pop(node, None)
        self.tell()

    def all(self) -> list[Failure]:
        """Those that last, the oldest first."""
        with self._lock:
            lasting = [failure for node in self._held if (failure := self._of(node)) is not None]
        return sorted(lasting, key=lambda failure: failure.at)

    def lost(self, output: str, *, tentative: bool = False) -> NodeFailed | None:
        """Why an output gives nothing any more: of something it needs no replica is left. A reader
        of tentative results is served while a fragment that goes on without missing inputs has any
        left."""
        with self._lock:
            why = self._gone(output, f"client-{output}", tentative, {})
        return None if why is None else _error(f"output {output!r} gives no more results", why)

    def why_lost(self, output: str) -> str | None:
        """The failure that `lost` raises, as one line."""
        with self._lock:
            why = self._gone(output, f"client-{output}", False, {})
        return None if why is None else why.text()

    def stopped(self, output: str) -> NodeFailed | None:
        """`lost`, or its reader in this process failed."""
        with self._lock:
            reader = self._ended(f"client {output}")
        if reader is None:
            return self.lost(output)
        return _error(f"output {output!r} is no longer read", reader)

    def unread(self, source: str) -> NodeFailed | None:
        """Why the rows of a source reach no output any more."""
        reading = [name for name, members in self._needs.items() if member(source) in members]
        with self._lock:
            gone = [self._gone(name, f"client-{name}", True, {}) for name in reading]
        why = [failure for failure in gone if failure is not None]
        if not why or len(why) < len(gone):
            return None
        return _error(
            f"source {source!r} takes no more rows, nothing that reads it is left", why[0]
        )

    def tell(self) -> None:
        """Whoever waits for an output that is lost hears so, after what can still be read of it;
        and whoever pushes rows that only such outputs would read."""
        for client in list(self._clients):
            output = client.output
            if (error := self.lost(output, tentative=client.tentative)) is not None:
                log = self._logs.get(output)
                opened = log is not None and log.has(output)
                client.fail(error, log.info(output).complete_upto if log and opened else None)
        for name, source in self._pushed.items():
            source.failure = self.unread(name)

    def troubles(self, nodes: Iterable[Mapping[str, Any]]) -> list[Failure]:
        """Of the status of nodes: what keeps one from getting on at the moment, which it tries
        again by itself."""
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
    ) -> Failure:
        message, cause, where = str(error), None, user_location
        if isinstance(error, BaseException):
            cause, where = error, where or location_of(error)
            if not isinstance(error, HoldfastError):
                message = f"{type(error).__name__}: {error}"
        where = where or location_in(message)
        message = " ".join(message.split())
        if where is not None and where not in message:
            message = f"{message}, at {where}"
        outputs = tuple(name for name, members in self._needs.items() if node in members)
        return Failure(node, outputs, message, where, now_us(), permanent, cause)

    def _members(self, output: str) -> set[str]:
        known, found = producers_of(self._network), {f"client {output}"}
        streams = [output]
        while streams:
            stream = streams.pop()
            producers = {member(stream)} if stream in self._sources else {*known[stream]}
            if not producers <= found:
                found |= producers
                if stream not in self._sources:
                    streams += self._inputs[fragment_of(known[stream][0])]
        return found

    def _of(self, node: str) -> Failure | None:
        if node not in self._held:
            return None
        failure, epoch = self._held[node]
        return None if self._epoch(node) > epoch else failure

    def _gone(self, stream: str, reader: str, tentative: bool, known: Known) -> Failure | None:
        """Why nobody makes a stream for `reader` any more: the failure that ended the last one."""
        if not self._held:  # as almost always, and asked at every turn of whoever waits
            return None
        if stream in self._sources:
            return self._ended(member(stream))
        producers = producers_for(self._network, stream, reader)[: 1 if self._local else None]
        for producer in producers:
            if producer not in known:
                known[producer] = self._stopped(producer, tentative, known)
        why = [failure for producer in producers if (failure := known[producer]) is not None]
        return max(why, key=lambda failure: failure.at) if len(why) == len(producers) else None

    def _stopped(self, node: str, tentative: bool, known: Known) -> Failure | None:
        """Why a node gives no results any more: it failed, or something it needs is gone."""
        if (failure := self._ended(node)) is not None:
            return failure
        inputs = self._inputs[fragment_of(node)]
        gone = [why for name in inputs if (why := self._gone(name, node, tentative, known))]
        without = tentative and self._network.protection(fragment_of(node)).on_failure != "block"
        return gone[0] if gone and not (without and len(gone) < len(inputs)) else None

    def _ended(self, node: str) -> Failure | None:
        failure = self._of(node)
        return failure if failure is not None and failure.permanent else None


def member(source: str) -> str:
    """What a source is called among nodes, which may have the same names."""
    return f"source {source}"


def _error(what: str, why: Failure) -> NodeFailed:
    error = NodeFailed(f"{what}: {why.text()}", why.user_location)
    error.__cause__ = why.error
    return error
