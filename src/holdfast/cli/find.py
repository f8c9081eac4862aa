"""Finds the storage of a network, and the running network that uses it."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from holdfast.errors import SetupError, TransportError
from holdfast.streams.calls import Request
from holdfast.transport.flight import FlightPeer

ROOT = "holdfast-data"
R = TypeVar("R")


def storage_of(storage: str | None, network: Any, app: str | None) -> str:
    """The given folder, the default folder of the network, or the only folder that exists."""
    if storage is not None:
        return storage
    if network is not None:
        return os.path.join(ROOT, network.name)
    if app is not None:
        from holdfast.model.loading import load

        return os.path.join(ROOT, load(app).name)
    networks = sorted(os.listdir(ROOT)) if os.path.isdir(ROOT) else []
    live = [name for name in networks if is_running(os.path.join(ROOT, name))]
    for names in (live, networks):
        if len(names) == 1:
            return os.path.join(ROOT, names[0])
    content = f"{ROOT} holds {', '.join(networks)}" if networks else f"there is none in ./{ROOT}"
    raise SetupError(f"expected one network, but {content}; choose the storage with --storage DIR")


def is_running(storage: str) -> bool:
    """Whether a run uses the storage. Also true for a killed run, whose file remains."""
    return os.path.exists(_described(storage))


def running(storage: str) -> FlightPeer:
    return FlightPeer(described(storage, "address")["address"])


def ask(storage: str, request: Request[R]) -> R:
    """The reply of the run that uses the storage."""
    try:
        return running(storage).call(request)
    except TransportError as err:
        raise TransportError(
            f"the run on {storage} does not answer: {err}. If process "
            f"{described(storage).get('pid')} is gone, start the run again; otherwise see its log"
        ) from err


def described(storage: str, *wanted: str) -> dict[str, Any]:
    """The contents of `run.json` of a running network; the keys `wanted` are required."""
    path = _described(storage)
    try:
        with open(path) as file:
            description: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        raise SetupError(
            f"no run is using {storage}; start one with `holdfast run APP --storage {storage}`"
        ) from None
    except ValueError:
        raise SetupError(f"{path} is not valid JSON; stop the run and delete the file") from None
    if not isinstance(description, dict) or not description.keys() >= set(wanted):
        raise SetupError(
            f"{path}: expected the fields {', '.join(wanted)}; the run uses another version of "
            "Holdfast: use that version, or stop the run and start it again"
        )
    return description


def _described(storage: str) -> str:
    return os.path.join(storage, "run.json")
