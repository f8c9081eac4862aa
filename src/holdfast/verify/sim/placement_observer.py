"""Observes hosts from outside: at the end every node runs on the host that the controller assigned,
and nowhere else; and a standby takes over the nodes of a lost host."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.membership import dead_of
from holdfast.verify.history import Restored, Stopped
from holdfast.verify.sim.host_process import HostProcess
from holdfast.verify.sim.simulated_run import Cast

#: Time within which a dead node is assigned to a standby, if a standby is reachable.
TAKEN_US = 3_000_000


class Placement:
    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        #: Since when a node has been dead with its host, while a standby could take it over.
        self._waits: dict[str, int] = {}
        #: The host assigned to each node; the life of each host at the last look; and when each
        #: host was last unreachable or restarted.
        self._placed: dict[str, str] = {}
        self._lives: dict[str, int] = {}
        self._mute_at: dict[str, int] = {}

    def look(self, now: int) -> Iterator[Restored | Stopped]:
        yield from self._moved(now)
        waiting = self._waiting()
        self._waits = {name: self._waits.get(name, now) for name in waiting}
        for name, since in self._waits.items():
            if now - since > TAKEN_US:
                yield Restored(now, name, since - 10 * TAKEN_US, calm=True)

    def all_run(self) -> bool:
        return all(node.is_up for node in self._cast.nodes)

    def end(self, now: int) -> Iterator[Stopped]:
        for node in self._cast.nodes:
            if not node.is_up:
                yield Stopped(now, node.name, "ours", "it is not running at the end of the run")
        controller = self._cast.wire.controller.controller
        for host in self._cast.hosts.values() if controller is not None else ():
            assigned = controller.assigned(host.name)
            for name, node in host.nodes.items():
                if node.alive and name not in assigned:
                    why = f"it runs on {host.name} but is assigned to another host"
                    yield Stopped(now, name, "ours", why)

    def _moved(self, now: int) -> Iterator[Stopped]:
        """A node is moved to another host only if its host is gone. A restarted controller knows
        the previous assignment."""
        controller = self._cast.wire.controller.controller
        for host in self._cast.hosts.values():
            if not self._speaks(host) or self._lives.get(host.name, host.life) != host.life:
                self._mute_at[host.name] = now
            self._lives[host.name] = host.life
        for to in self._cast.hosts if controller is not None else ():
            for name in controller.assigned(to):
                before = self._placed.get(name, to)
                self._placed[name] = to
                if before == to or now - self._mute_at.get(before, now - TAKEN_US) < TAKEN_US:
                    continue
                node = self._cast.hosts[before].nodes.get(name)
                if node is not None and node.alive:
                    yield Stopped(
                        now, name, "ours", f"it was moved away from {before}, which still runs it"
                    )

    def _waiting(self) -> list[str]:
        process = self._cast.wire.controller
        controller = process.controller
        if controller is None or process.paused:
            return []
        dead = dead_of(controller.statuses())
        if not dead:
            return []
        free = [
            host for host in self._cast.hosts.values()
            if self._speaks(host) and not controller.assigned(host.name)
        ]  # fmt: skip
        nodes = [node for node in self._cast.nodes if node.name in dead]
        gone = [node.host for node in nodes if not node.host.alive]
        return [
            name for host in dict.fromkeys(gone) for name in controller.assigned(host.name)
            if free and self._cast.by_name[name] in nodes
        ]  # fmt: skip

    def _speaks(self, host: HostProcess) -> bool:
        link, name = self._cast.wire.link, host.name
        cut = link(name, "controller").cut or link("controller", name).cut
        return host.alive and not host.paused and not cut
