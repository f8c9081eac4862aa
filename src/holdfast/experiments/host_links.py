"""Proxies between the hosts of a run, so that a host can be cut off from all others and from the
controller. Connections stay open, and bytes wait: only missing heartbeats reveal the cut."""

from __future__ import annotations

from holdfast.runtime.running import Run
from holdfast.storage.root import CONTROLLER
from holdfast.verify.chaos.proxy import Link, Proxies


class HostLinks:
    def __init__(self, run: Run) -> None:
        self._run, self._proxies = run, Proxies()
        #: Host of each address, from the time when the address was first used.
        self._host_at: dict[str, str] = {}
        #: Both ends of each link.
        self._ends: dict[Link, tuple[str, str]] = {}
        self._cut: list[Link] = []
        run.route = self._route

    def cut(self, host: str) -> None:
        self._cut = [link for link, ends in list(self._ends.items()) if host in ends]
        for link in self._cut:
            link.cut()

    def mend(self) -> None:
        for link in self._cut:
            link.mend()
        self._cut = []

    def close(self) -> None:
        self._proxies.close()

    def _route(self, consumer: str, producer: str, address: str) -> str:
        """Links belong to hosts. A node that moves to another host gets new links there."""
        to_host = self._host(consumer)
        from_host = self._host_at.setdefault(address, self._host(producer))
        link = self._proxies.link(f"{producer} at {address}", f"{consumer} on {to_host}", address)
        self._ends[link] = (from_host, to_host)
        return link.address

    def _host(self, name: str) -> str:
        """The host of a node. Sources and clients run beside the controller."""
        if name in self._run.layout or name == CONTROLLER:
            return name
        hosts = [host for host in self._run.layout if name in self._run.controller.assigned(host)]
        return hosts[0] if hosts else CONTROLLER
