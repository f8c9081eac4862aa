"""Network namespaces: each has an address of its own, and loopback reaches nobody else."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType


def available() -> bool:
    """Whether this process may create network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Loopback:
    """The same names without namespaces."""

    host = "127.0.0.1"

    def __init__(self, count: int) -> None:
        self.names = [f"worker{number}" for number in range(count)]
        self.addresses = [self.host] * count

    def inside(self, name: str) -> None:
        return None


class Namespaces:
    """`count` namespaces connected by a bridge, to which this process has the first address."""

    def __init__(self, count: int) -> None:
        tag = os.getpid() % 10_000
        self._bridge = f"hfb{tag}"
        self._net = f"10.{200 + tag % 50}.{tag // 50 % 250}"
        self.names = [f"hf{tag}-{number}" for number in range(count)]
        self.host = f"{self._net}.1"
        self.addresses = [f"{self._net}.{number + 2}" for number in range(count)]

    def inside(self, name: str) -> str:
        """The namespace in which a process of this name runs."""
        return name

    def __enter__(self) -> Namespaces:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
                outside, inside = f"{self._bridge}o{number}", f"{self._bridge}i{number}"
                _ip("netns", "add", name)
                _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
                _ip("link", "set", inside, "netns", name)
                _ip("link", "set", outside, "master", self._bridge)
                _ip("link", "set", outside, "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", inside)
                _ip("-n", name, "link", "set", inside, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
