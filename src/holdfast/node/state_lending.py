"""What a node retains for a newcomer, a peer that is rebuilt from it
(`core.catch_up_events.Lending`): versions of its state, segments of its results, and the names
under which both can be fetched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from holdfast.core.catch_up_events import BeganEmpty, Lending, NotReady
from holdfast.engine.state import Version
from holdfast.model.fragments import Fragment
from holdfast.node.node_events import (
    LeaseDue,
    StateAnswer,
    StateAsked,
    StateReleased,
    StateRenewed,
)
from holdfast.node.state_transfer import Fingerprints, describe
from holdfast.storage import Log
from holdfast.streams.calls import OfferedState
from holdfast.streams.serving import Service


class Lender:
    """Lends the state of a node to newcomers. Only the thread of the node's loop calls it."""

    def __init__(
        self,
        name: str,
        fragment: Fragment,
        log: Log,
        service: Service,
        post: Callable[[LeaseDue, float], None],
    ) -> None:
        self._name, self._fragment, self._log, self._service = name, fragment, log, service
        self._post = post
        self._lending = Lending()
        #: Lent versions by newcomer.
        self._lent: dict[str, list[Version]] = {}

    def versions(self, path: str) -> list[Version]:
        """Versions of a path whose files must be retained."""
        return [v for lent in self._lent.values() for v in lent if v.path == path]

    def handle(
        self,
        event: StateAsked | StateRenewed | StateReleased | LeaseDue,
        at: int,
        versions: Mapping[str, Version],
        forgotten: Iterable[str],
    ) -> None:
        match event:
            case StateAsked():
                event.reply(self.lend(event.newcomer, at, versions, forgotten))
            case StateRenewed():
                self._lending.renew(at, event.newcomer)
            case StateReleased():
                self._lending.end(event.newcomer)
                self._return([event.newcomer])
            case LeaseDue():
                gone, due = self._lending.expired(at)
                self._return(gone)
                if due is not None:
                    self._post(LeaseDue(), (due - at) / 1e6)

    def lend(
        self,
        newcomer: str,
        at: int,
        versions: Mapping[str, Version],
        forgotten: Iterable[str] = (),
    ) -> StateAnswer:
        """The current state of all paths. The listed files are retained until the newcomer has
        fetched them, or until its lease expires without renewal."""
        opened, paths = set(self._log.streams()), {path.name: path for path in self._fragment.paths}
        if versions.keys() != paths.keys() or not opened >= set(self._fragment.outputs):
            if not versions and not opened:
                return BeganEmpty()
            return NotReady(f"{self._name} has not yet opened all its inputs")
        if any(forgotten):
            return NotReady(
                f"{self._name} is correcting its results, and retains no state meanwhile"
            )
        lent = [describe(self._log, v, paths[v.path].outputs) for v in versions.values()]
        results = [r for moving in lent for r in moving.results]
        files = [os.path.join("state", name) for moving in lent for name in moving.files]
        files += [segment.path for r in results for segment in r.segments]
        self._lent[newcomer] = list(versions.values())
        self._service.pins[newcomer] = {r.stream: r.trimmed_upto + 1 for r in results}
        self._service.offered |= {name: os.path.join(str(self._log.root), name) for name in files}
        self._post(LeaseDue(), (self._lending.lend(at, newcomer) - at) / 1e6)
        return tuple(lent)

    def _return(self, newcomers: Iterable[str]) -> None:
        for newcomer in newcomers:
            self._lent.pop(newcomer, None)
            self._service.pins.pop(newcomer, None)
        if not self._lent:
            self._service.offered = {}


def offer_of(
    answer: StateAnswer, fingerprints: Fingerprints, renew: Callable[[], None] = lambda: None
) -> OfferedState:
    """The reply that is sent to the newcomer. The newcomer renews its lease when it has the reply;
    until then, `renew` does."""
    match answer:
        case BeganEmpty():
            return OfferedState("began-empty")
        case NotReady():
            return OfferedState("not-ready", why=answer.why)
    return OfferedState("state", answer, fingerprints.of(answer, renew))
