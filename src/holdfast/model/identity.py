"""The identity of a run: which query it computes, with which code, on which libraries.

Results of two replicas are the same to the bit only if all of this is the same, and so are results
from before and after a restart. So it is written into the storage when a network is first started
(`storage/root.py`), every host is compared with it before it runs anything (`Controller.admit`),
and state is stamped with the part of it that made it (`Engine.plan_hash`).

What a query is fed with, what is promised of it and who reads it are not part of it: they change
which rows there are, and when, but not what is computed from them.
See docs/design/0011-identity-of-a-run.md.
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

#: Every run depends on them; others are added when the query's functions use them.
LIBRARIES = ("holdfast", "numpy", "pandas", "pyarrow", "pyspark")
#: Differences that a message lists.
TOLD = 8

#: Operators of which only these options are part of the query.
_SETTINGS: dict[type[ops.Operator], tuple[str, ...]] = {
    ops.Source: ("schema", "time"),
    ops.Output: ("inputs", "fragment"),
}
_SCHEMAS = ("schema", "state", "out")
_ITS = "function's "
#: A name and a digest.
_CODE = re.compile(r"(\S+) #[0-9a-f]{16}")

Parts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Identity:
    #: By operator, and "network" for all of them: its options, as text.
    query: Parts
    #: How each fragment is protected: equal in all processes of a run, free to change between two.
    protection: Parts
    libraries: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Of the query: equal for runs that may share a storage."""
        return digest(_flat(self.query))

    def body(self) -> dict[str, Any]:
        return {"query": _plain(self.query), "protection": _plain(self.protection),
                "libraries": dict(self.libraries)}  # fmt: skip

    @staticmethod
    def of(body: Any, where: str) -> Identity:
        """The inverse of `body`, of whatever somebody else has written."""
        known = {"query", "protection", "libraries"}
        if not isinstance(body, dict) or set(body) != known:
            found = sorted(body) if isinstance(body, dict) else type(body).__name__
            raise SetupError(
                f"{where}: expected an identity with {sorted(known)}, found {found}; it is of "
                "another version of Holdfast: use that one"
            )
        if not (_are_parts(body["query"]) and _are_parts(body["protection"])
                and _are_parts({"libraries": body["libraries"]})):  # fmt: skip
            raise SetupError(f"{where}: expected an identity as texts by name; it is damaged")
        return Identity(**body)


def identity_of(network: Network) -> Identity:
    """Of the network as it is now. Its functions are looked at once, before anything calls them:
    what they fill later (a cache) is not part of them."""
    known = _known(network)
    query = {"network": {"name": network.name, "bucket": duration_text(network.width_us),
                         "shards": str(network.partitions)}}  # fmt: skip
    query |= {op.name: known.options(op) for op in network.logical.operators}
    protection = {
        name: {option: str(value) for option, value in asdict(one).items()}
        for name, one in sorted(network.logical.protections.items())
    }
    for op in network.operators:
        known.options(op)
    return Identity(query, protection, known.libraries())


def operator_digest(network: Network, op: ops.Operator) -> str:
    """Of one operator of the network as it is run."""
    return digest(_flat({op.name: _known(network).options(op)}))


def query_differences(expected: Identity, found: Identity) -> list[str]:
    return _differences(expected.query, found.query)


def library_differences(expected: Identity, found: Identity) -> list[str]:
    return _differences({"library": expected.libraries}, {"library": found.libraries})


def differences(expected: Identity, found: Identity) -> list[str]:
    """All that keeps two processes from being of one run."""
    return [
        *query_differences(expected, found),
        *_differences(expected.protection, found.protection),
        *library_differences(expected, found),
    ]


def listed(told: list[str], before: str = "\n  - ") -> str:
    more = [f"and {len(told) - TOLD} more"] if len(told) > TOLD else []
    return before + before.join([*told[:TOLD], *more])


class _Described:
    """What is known of the operators of one network."""

    def __init__(self) -> None:
        self._fingerprints = Fingerprints()
        self._options: dict[str, dict[str, str]] = {}

    def options(self, op: ops.Operator) -> dict[str, str]:
        if op.name not in self._options:
            self._options[op.name] = {"kind": op.kind} | {
                name: text
                for it in fields(op)
                if it.name in _SETTINGS.get(type(op), {it.name})
                and it.name not in ("name", "feeds")
                for name, text in self._option(it.name, getattr(op, it.name)).items()
            }
        return self._options[op.name]

    def _option(self, name: str, value: Any) -> dict[str, str]:
        if name == "fn":
            return {} if value is None else self._function(value)
        if name == "inputs":
            return {"inputs": ", ".join(up.name for up in value if up is not None)}
        if name == "aggregates":
            return {f"aggregate {key}": self._aggregate(it) for key, it in value.items()}
        if name in _SCHEMAS:
            return {name: _schema(value)}
        if name.endswith("_us"):
            return {name.removesuffix("_us"): duration_text(value)}
        if isinstance(value, tuple):
            return {name: str(list(value))}
        return {name: value if isinstance(value, str) else self._fingerprints.text(value)}

    def _function(self, fn: Any) -> dict[str, str]:
        """What a function of ours holds is an option of the operator, such as the condition of a
        filter; what the application's functions refer to has names of its own."""
        parts = self._fingerprints.parts(fn)
        ours = " #" not in parts["function"]
        return {name if ours or name == "function" else f"{_ITS}{name}": text
                for name, text in parts.items()}  # fmt: skip

    def _aggregate(self, value: Any) -> str:
        if not isinstance(value, Aggregate):
            return self._fingerprints.text(value)
        params = [f"{name}={it!r}" for name, it in value.params]
        return f"{value.kind}({', '.join([value.arg or '', *params])})"

    def libraries(self) -> dict[str, str]:
        found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
        packages = {*LIBRARIES, *self._fingerprints.libraries} - sys.stdlib_module_names
        for package in sorted(packages):
            found |= {name: _version(name) for name in _distributions(package)}
        return found


def _known(network: Network) -> _Described:
    return _seen.setdefault(network.logical, _Described())


_seen: WeakKeyDictionary[Network, _Described] = WeakKeyDictionary()


@lru_cache
def _distributions(package: str) -> tuple[str, ...]:
    """What is installed under which name is asked only for packages that are not always there."""
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
    told = [f"{name}: removed" for name in expected if name not in found]
    told += [f"{name}: added" for name in found if name not in expected]
    for name, before in expected.items():
        after = found.get(name, before)
        for option in dict.fromkeys([*before, *after]):
            old, new = before.get(option, "none"), after.get(option, "none")
            if old != new:
                told.append(f"{name}: {_change(option, old, new)}")
    return told


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
