"""A rolling restart (Flux section 3.4: end a replica, bring up a new one, repeat): every host of a
running network is ended and started again, one after the other, while the rest goes on. A host that
comes back with another query, other code or other libraries is refused by the controller.

Where hosts stand by, they take over what an ended host ran, and that one stands by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.clock import monotonic_us
from holdfast.core.membership import process_of
from holdfast.errors import HoldfastError, IdentityMismatch, InputError
from holdfast.model.fragments import pairs_of
from holdfast.runtime.run_status import node_status
from holdfast.streams.calls import Done, GetHosts, GetRestarted, Hosts, Restart, Restarted

if TYPE_CHECKING:
    from holdfast.runtime.running import Run

#: A host that is not back by then has a problem.
BACK_S = 300.0


class Rolling:
    def __init__(self, run: Run) -> None:
        self._run = run
        #: Of the hosts that were ended: epochs of the process and its nodes then, and how far each
        #: node was.
        self._before: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        run.service.handle(GetHosts, lambda _: Hosts(tuple(run.layout)))
        run.service.handle(Restart, self._asked)
        run.service.handle(GetRestarted, lambda ask: Restarted(self.restarted(ask.host)))

    def hosts(
        self, say: Callable[[str], None] = lambda text: None, hosts: Sequence[str] | None = None
    ) -> None:
        """All of them, or those, one after the other."""
        for host in hosts or self._run.layout:
            began = time.monotonic()
            self.restart(host)
            back = partial(self.restarted, host)
            self._run.wait_for(back, BACK_S, f"host {host} to come back")
            say(f"host {host} restarted in {time.monotonic() - began:.1f} s")

    def restart(self, host: str) -> None:
        """End it in good order; it is started again. Returns at once."""
        run = self._run
        if host not in run.processes:
            known = ", ".join(run.processes) or "none: restart works with deployment='processes'"
            raise InputError(f"there is no host {host!r} (hosts: {known})")
        names = run.controller.assigned(host)
        epochs = {name: run.controller.epoch(name) for name in (process_of(host), *names)}
        peers = pairs_of(run.network)
        reached = {}
        # One that hangs is not asked: it does not answer.
        for name in names if run.controller.speaks(host, monotonic_us()) else ():
            both = [position(node_status(run, one)) for one in {name, peers.get(name, name)}]
            if begun := [at for at in both if at is not None]:
                reached[name] = max(begun)
        self._before[host] = (epochs, reached)
        run.processes[host].end()

    def restarted(self, host: str) -> bool:
        """It is back; and whatever it ran is where it, or its partner, was then."""
        if host not in self._before:
            raise InputError(f"host {host!r} was not asked to restart")
        epochs, reached = self._before[host]
        controller = self._run.controller
        if (why := controller.refused(host)) is not None:
            raise IdentityMismatch(why)
        away = [name for name, epoch in epochs.items() if controller.epoch(name) <= epoch]
        if away:
            if process_of(host) not in away:
                self._raise_refused(host, away)
            return False
        now = {name: position(node_status(self._run, name)) for name in reached}
        return all(at is not None and at >= reached[name] for name, at in now.items())

    def _raise_refused(self, host: str, away: Sequence[str]) -> None:
        """Raise what keeps nodes of a host that is back from coming up, if only a person can
        help."""
        known = self._run.parts.nodes()
        for name in away:
            if name in known and known[name].final:
                raise HoldfastError(f"host {host!r} is back, but node {name!r} {known[name].text}")

    def _asked(self, ask: Restart) -> Done:
        self.restart(ask.host)
        return Done()


def position(told: dict[str, Any]) -> int | None:
    """How far a node is, by its slowest path."""
    found = [path["position"] for path in told.get("paths", {}).values()]
    return None if not found or None in found else min(found)
