"""Faults as data: one file defines which faults occur and when, for the simulator and for real
processes.

    name = "zombie"
    network = "chain"
    seconds = 20

    [[fault]]
    at = "3s"
    do = "pause"
    on = "second"
    for = "4s"

All randomness derives from `seed`. Times count from the start of the run; `for` is the time until a
fault heals, and is required unless the fault is momentary.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.config import duration_text, duration_us
from holdfast.errors import InputError
from holdfast.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """The effect of a fault, and the parameters that the fault requires."""

    about: str
    #: `process`: a node, source, client or the controller; `link`: `a->b`, `a<->b`, or groups
    #: `a,b<->c`; `source`, `node`: only these.
    target: str
    #: The fault lasts for a while (`for`); otherwise the fault is momentary.
    lasts: bool
    #: Meaning of `value`; empty if the fault takes no value.
    takes: str = ""
    #: Requires simulated time and storage.
    simulated_only: bool = False


KINDS: Mapping[str, Kind] = {
    "kill": Kind("the process dies and is restarted after `for`", "process", True),
    "wipe": Kind("the process dies and its storage is deleted", "process", True),
    "torn": Kind("the process dies halfway through its `value`-th next write", "process", True,
                 takes="a number of writes", simulated_only=True),
    "pause": Kind("the process is paused, then resumed", "process", True),
    "replace": Kind("the node is paused, replaced by a successor, and then resumed", "node", True),
    "slow": Kind("every step takes `value` times as long", "node", True, takes="a factor",
                 simulated_only=True),
    "full": Kind("the storage has no space left", "process", True, simulated_only=True),
    "skew": Kind("the clock of the source is off by `value` ms", "source", True,
                 takes="milliseconds", simulated_only=True),
    "silent": Kind("the source sends no rows and closes no buckets", "source", True),
    "retire": Kind("the source is silent, and is abandoned for good after `for`", "source", True,
                   simulated_only=True),
    "end": Kind("the source ends: no rows follow", "source", False, simulated_only=True),
    "restore": Kind("the storage is copied; after `for`, the process restarts with that copy",
                    "node", True, simulated_only=True),
    "cut": Kind("the link carries no data", "link", True),
    "reset": Kind("all connections break; new connections are possible at once", "link", False),
    "delay": Kind("all data arrives `value` ms later", "link", True, takes="milliseconds"),
    "throttle": Kind("the link carries at most `value` kB per second", "link", True,
                     takes="kB per second"),
    "repeat": Kind("acknowledgements arrive twice, the second time late", "link", True,
                   simulated_only=True),
    "damage": Kind("rows are corrupted in transit", "link", True, simulated_only=True),
    "hang": Kind("the node is alive but makes no progress", "node", True,
                 simulated_only=True),
    "clock": Kind("the wall clock is stepped by `value` ms, and back", "process", True,
                  takes="milliseconds", simulated_only=True),
    "rot": Kind("a bit flips in a file of the storage", "process", False, simulated_only=True),
    "rot-state": Kind("a bit flips in a file of the state; after `for`, the file is restored and "
                      "the node restarts", "node", True, simulated_only=True),
    "eio-read": Kind("reads of the storage fail", "process", True, simulated_only=True),
    "eio-fsync": Kind("fsync of the storage fails", "process", True, simulated_only=True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    at_us: int
    do: str
    on: str
    for_us: int = 0
    value: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at_us / 1e6:.3f}s {self.do} {self.on}"]
        if self.value:
            parts.append(f"value {self.value:g}")
        if self.for_us:
            parts.append(f"for {self.for_us / 1e6:.3f}s")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    network: str
    seconds: float
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    about: str = ""

    def without(self, *numbers: int) -> Scenario:
        remaining = tuple(f for number, f in enumerate(self.faults) if number not in numbers)
        return replace(self, faults=remaining)

    def toml(self) -> str:
        lines = [f'name = "{self.name}"', f'network = "{self.network}"',
                 f"seconds = {self.seconds:g}", f"seed = {self.seed}"]  # fmt: skip
        for fault in self.faults:
            at = duration_text(fault.at_us) if fault.at_us else "0s"
            lines += ["", "[[fault]]", f'at = "{at}"', f'do = "{fault.do}"',
                      f'on = "{fault.on}"']  # fmt: skip
            if fault.for_us:
                lines.append(f'for = "{duration_text(fault.for_us)}"')
            if fault.value:
                lines.append(f"value = {fault.value:g}")
        return "\n".join(lines) + "\n"


def read_scenario(path: str | Path) -> Scenario:
    try:
        text = Path(path).read_text()
    except OSError as err:
        raise InputError(f"{path} cannot be read: {err.strerror}") from None
    return parse_scenario(text, str(path))


def parse_scenario(text: str, path: str = "scenario") -> Scenario:
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise InputError(f"{path}: not TOML ({err})") from None
    unknown = sorted(set(body) - {"name", "network", "seconds", "seed", "fault", "about"})
    if unknown:
        raise InputError(f"{path}: unknown keys: {', '.join(unknown)}")
    for key, kind in (("network", str), ("seconds", (int, float))):
        if not isinstance(body.get(key), kind):
            raise InputError(f"{path}: {key} is missing or has the wrong type")
    faults = body.get("fault", [])
    if not isinstance(faults, list):
        raise InputError(f"{path}: write faults as [[fault]]")
    parsed = [_fault(fault, f"{path}, fault {number}") for number, fault in enumerate(faults, 1)]
    return Scenario(
        body.get("name", Path(path).stem), body["network"], float(body["seconds"]), tuple(parsed),
        int(body.get("seed", 0)), body.get("about", ""),
    )  # fmt: skip


def _fault(body: Mapping[str, Any], where: str) -> Fault:
    unknown = sorted(set(body) - {"at", "do", "on", "for", "value"})
    if unknown:
        raise InputError(f"{where}: unknown keys: {', '.join(unknown)}")
    do = body.get("do", "")
    if do not in KINDS:
        raise InputError(f"{where}: do = {do!r} is not one of {', '.join(KINDS)}")
    kind = KINDS[do]
    for key in ("at", "on", *(["for"] if kind.lasts else [])):
        if not isinstance(body.get(key), str):
            raise InputError(f'{where}: {do} needs {key} = "..."')
    if kind.takes and not isinstance(body.get("value"), int | float):
        raise InputError(f"{where}: {do} needs value = {kind.takes}")
    if (kind.target == "link") != ("->" in body["on"]):
        raise InputError(
            f"{where}: {do} expects a {kind.target} as its target, found {body['on']!r}"
        )
    at_us = 0 if body["at"] in ("0", "0s") else duration_us(body["at"], of=f"{where}: at")
    for_us = duration_us(body["for"], of=f"{where}: for") if "for" in body else 0
    return Fault(at_us, do, body["on"], for_us, float(body.get("value", 0)))


def ends_of(link: str) -> list[tuple[str, str]]:
    """The directed pairs that a link names: `a->b`, `a<->b`, `a,b<->c`."""
    both = "<->" in link
    senders, _, receivers = link.partition("<->" if both else "->")
    pairs = [(a.strip(), b.strip()) for a in senders.split(",") for b in receivers.split(",")]
    return pairs + [(b, a) for a, b in pairs] if both else pairs
