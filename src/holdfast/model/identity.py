"""The identity of a run: its query, its code and its libraries.

Two replicas produce the same results to the bit only if their identities are equal. The same holds
for results before and after a restart. The identity is therefore written to the storage when a
network is first started (`storage/root.py`). Every host is compared with the stored identity before
the host runs anything (`Controller.admit`). A state version carries a hash of the operators that
produced the state (`Engine.plan_hash`).

Feeds, contracts and sinks are not part of the identity: they change which rows exist and when, but
not the results computed from these rows. See docs/design/0011-identity-of-a-run.md.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.config import duration_text
from holdfast.errors import HoldfastError, SetupError
from holdfast.model import operators as ops
from holdfast.model.aggregates import Aggregate
from holdfast.model.fingerprint import Fingerprints, digest
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema, schema_ddl

#: Libraries of every run. Other libraries are added if functions of the query use them.
LIBRARIES = ("holdfast", "numpy", "pandas", "pyarrow", "pyspark")
#: Most differences that a message lists.
LINES_SHOWN = 8

#: Options that are part of the identity, for operators of which not all options are.
_SETTINGS: dict[type[ops.Operator], tuple[str, ...]] = {
    ops.Source: ("schema", "time"),
    ops.Output: ("inputs", "fragment"),
}
_SCHEMAS = ("schema", "state", "out")
_ITS = "function's "
#: Fingerprint of a function or class: a name and a digest.
_CODE = re.compile(r"(\S+) #[0-9a-f]{16}")

Parts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Identity:
    #: Options of each operator as text, by operator name; options of the network under "network".
    query: Parts
    #: Protection of each fragment: equal in all processes of a run; may change between runs.
    protection: Parts
    libraries: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Digest of the query; equal for runs that may use the same storage."""
        return digest(_flat(self.query))

    def body(self) -> dict[str, Any]:
        return {"query": _plain(self.query), "protection": _plain(self.protection),
                "libraries": dict(self.libraries)}  # fmt: skip

    @staticmethod
    def of(body: Any, where: str) -> Identity:
        """The inverse of `body`. The input is validated: another process may have written it."""
        expected = {"query", "protection", "libraries"}
        if not isinstance(body, dict) or set(body) != expected:
            keys = sorted(body) if isinstance(body, dict) else type(body).__name__
            raise SetupError(
                f"{where}: expected an identity with {sorted(expected)}, found {keys}; another "
                "version of Holdfast wrote it: use that version"
            )
        if not (_are_parts(body["query"]) and _are_parts(body["protection"])
                and _are_parts({"libraries": body["libraries"]})):  # fmt: skip
            raise SetupError(
                f"{where}: expected an identity that maps names to texts, found other content; "
                "restore the file from a backup, or delete it: the query is then checked against "
                "the log of the controller"
            )
        return Identity(**body)


def identity_of(network: Network) -> Identity:
    """The identity of a network. Functions are described once, before their first call, so that
    values which a function stores later (a cache) are not part of the identity."""
    described = _known(network)
    query = {"network": {"name": network.name, "bucket": duration_text(network.width_us),
                         "shards": str(network.partitions)}}  # fmt: skip
    query |= {op.name: described.options(op) for op in network.logical.operators}
    protection = {
        name: {key: str(value) for key, value in asdict(options).items()}
        for name, options in sorted(network.logical.protections.items())
    }
    for op in network.operators:
        described.options(op)
    return Identity(query, protection, described.libraries())


def operator_digest(network: Network, op: ops.Operator) -> str:
    """Digest of one operator of the network as it is run (`partitions.physical`)."""
    return digest(_flat({op.name: _known(network).options(op)}))


def query_differences(expected: Identity, found: Identity) -> list[str]:
    return _differences(expected.query, found.query)


def library_differences(expected: Identity, found: Identity) -> list[str]:
    return _differences({"library": expected.libraries}, {"library": found.libraries})


def differences(expected: Identity, found: Identity) -> list[str]:
    """All differences that prevent two processes from taking part in the same run."""
    return [
        *query_differences(expected, found),
        *_differences(expected.protection, found.protection),
        *library_differences(expected, found),
    ]


def listed(lines: list[str], before: str = "\n  - ") -> str:
    overflow = [f"and {len(lines) - LINES_SHOWN} more"] if len(lines) > LINES_SHOWN else []
    return before + before.join([*lines[:LINES_SHOWN], *overflow])


class _Described:
    """The described options of the operators of one network."""

    def __init__(self) -> None:
        self._fingerprints = Fingerprints()
        self._options: dict[str, dict[str, str]] = {}

    def options(self, op: ops.Operator) -> dict[str, str]:
        if op.name not in self._options:
            self._options[op.name] = {"kind": op.kind} | {
                name: text
                for option in fields(op)
                if option.name in _SETTINGS.get(type(op), {option.name})
                and option.name not in ("name", "feeds")
                for name, text in self._option(option.name, getattr(op, option.name)).items()
            }
        return self._options[op.name]

    def _option(self, name: str, value: Any) -> dict[str, str]:
        if name == "fn":
            return {} if value is None else self._function(value)
        if name == "inputs":
            return {"inputs": ", ".join(up.name for up in value if up is not None)}
        if name == "aggregates":
            return {
                f"aggregate {key}": self._aggregate(aggregate) for key, aggregate in value.items()
            }
        if name in _SCHEMAS:
            return {name: _schema(value)}
        if name.endswith("_us"):
            return {name.removesuffix("_us"): duration_text(value)}
        if isinstance(value, tuple):
            return {name: str(list(value))}
        return {name: value if isinstance(value, str) else self._fingerprints.text(value)}

    def _function(self, fn: Any) -> dict[str, str]:
        """Parts of a function. Values that a function of Holdfast holds, such as the condition of
        a filter, are named like options of the operator; references of an application's function
        get the prefix `function's`."""
        parts = self._fingerprints.parts(fn)
        ours = " #" not in parts["function"]
        return {name if ours or name == "function" else f"{_ITS}{name}": text
                for name, text in parts.items()}  # fmt: skip

    def _aggregate(self, value: Any) -> str:
        if not isinstance(value, Aggregate):
            return self._fingerprints.text(value)
        params = [f"{name}={param!r}" for name, param in value.params]
        return f"{value.kind}({', '.join([value.arg or '', *params])})"

    def libraries(self) -> dict[str, str]:
        versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
        packages = {*LIBRARIES, *self._fingerprints.libraries} - sys.stdlib_module_names
        for package in sorted(packages):
            versions |= {name: _version(name) for name in _distributions(package)}
        return versions


def _known(network: Network) -> _Described:
    return _seen.setdefault(network.logical, _Described())


_seen: WeakKeyDictionary[Network, _Described] = WeakKeyDictionary()


@lru_cache
def _distributions(package: str) -> tuple[str, ...]:
    """The distributions of a package. The slow metadata lookup is skipped for `LIBRARIES`."""
    if package in LIBRARIES:
        return (package,)
    return tuple(sorted(set(importlib.metadata.packages_distributions().get(package, ()))))


@lru_cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _schema(text: str) -> str:
    try:
        return schema_ddl(arrow_schema(text))
    except HoldfastError:
        return text


def _differences(expected: Parts, found: Parts) -> list[str]:
    changes = [f"{name}: removed" for name in expected if name not in found]
    changes += [f"{name}: added" for name in found if name not in expected]
    for name, before in expected.items():
        after = found.get(name, before)
        for option in dict.fromkeys([*before, *after]):
            old, new = before.get(option, "none"), after.get(option, "none")
            if old != new:
                changes.append(f"{name}: {_change(option, old, new)}")
    return changes


def _change(option: str, old: str, new: str) -> str:
    before, after = _CODE.fullmatch(old), _CODE.fullmatch(new)
    if before is None or after is None or before[1] != after[1]:
        return f"{option} {old} -> {new}"
    return f"the code of {before[1] if option == 'function' else option.removeprefix(_ITS)} changed"


def _flat(parts: Parts) -> list[str]:
    return [f"{part}.{name}={parts[part][name]}" for part in sorted(parts) for name in
            sorted(parts[part])]  # fmt: skip


def _plain(parts: Parts) -> dict[str, dict[str, str]]:
    return {name: dict(options) for name, options in parts.items()}


def _are_parts(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(options, dict)
        and all(isinstance(text, str) for pair in options.items() for text in pair)
        for options in value.values()
    )
