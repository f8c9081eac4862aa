"""Rolling restart (Flux section 3.4: stop a replica, start a new one, repeat).

The hosts of a running network are restarted one after the other while the others continue. The
controller refuses a host that returns with another query, other code or other libraries.

A standby takes over the nodes of a stopped host; that host becomes a standby when it returns.
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

#: Time limit for the restart of one host.
BACK_S = 300.0


class Rolling:
    def __init__(self, run: Run) -> None:
        self._run = run
        #: For each restarted host, as of the request: the epochs of its process and nodes, and the
        #: positions of its nodes.
        self._before: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        run.service.handle(GetHosts, lambda _: Hosts(tuple(run.layout)))
        run.service.handle(Restart, self._asked)
        run.service.handle(GetRestarted, lambda ask: Restarted(self.restarted(ask.host)))

    def hosts(
        self, say: Callable[[str], None] = lambda text: None, hosts: Sequence[str] | None = None
    ) -> None:
        """Restart all hosts, or the given ones, one after the other."""
        for host in hosts or self._run.layout:
            began = time.monotonic()
            self.restart(host)
            is_back = partial(self.restarted, host)
            self._run.wait_for(is_back, BACK_S, f"host {host} to return")
            say(f"host {host} restarted in {time.monotonic() - began:.1f} s")

    def restart(self, host: str) -> None:
        """Stop a host cleanly; the supervisor restarts it. Returns at once."""
        run = self._run
        if host not in run.processes:
            hosts = ", ".join(run.processes) or "none; restart needs deployment='processes'"
            raise InputError(f"there is no host {host!r} (hosts: {hosts})")
        names = run.controller.assigned(host)
        epochs = {name: run.controller.epoch(name) for name in (process_of(host), *names)}
        peers = pairs_of(run.network)
        reached = {}
        # A hung host is not asked, because it would not answer.
        for name in names if run.controller.speaks(host, monotonic_us()) else ():
            positions = [position(node_status(run, one)) for one in {name, peers.get(name, name)}]
            if known_positions := [at for at in positions if at is not None]:
                reached[name] = max(known_positions)
        self._before[host] = (epochs, reached)
        run.processes[host].end()

    def restarted(self, host: str) -> bool:
        """Whether the host is back, and its former nodes have reached the positions that they or
        their peers had at the request."""
        if host not in self._before:
            raise InputError(f"no restart of host {host!r} was requested; call restart first")
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
        """Raise the error that prevents the start of a node on a host that is back, if the error
        needs an operator."""
        statuses = self._run.parts.nodes()
        for name in away:
            if name in statuses and statuses[name].final:
                raise HoldfastError(
                    f"host {host!r} is back, but node {name!r} {statuses[name].text}"
                )

    def _asked(self, ask: Restart) -> Done:
        self.restart(ask.host)
        return Done()


def position(status: dict[str, Any]) -> int | None:
    """The position of the slowest path of a node."""
    positions = [path["position"] for path in status.get("paths", {}).values()]
    return None if not positions or None in positions else min(positions)
