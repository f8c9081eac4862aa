"""Folders of the logs of a run, and the file by which commands find a running network."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.runtime.running import Run


def node_folder(storage: str, fragment: str) -> str:
    return os.path.join(storage, "nodes", fragment)


def client_folder(storage: str, output: str) -> str:
    return os.path.join(storage, "clients", output)


def client_names(storage: str) -> dict[str, list[str]]:
    """By output: the durable clients that the storage has, as names of consumers."""
    names: dict[str, list[str]] = {}
    folder = os.path.join(storage, "clients")
    for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        names.setdefault(entry.partition("+")[0], []).append(f"client-{entry}")
    return names


def source_folder(storage: str, source: str) -> str:
    return os.path.join(storage, "sources", source)


def describe(run: Run) -> None:
    """Write `run.json`, by which commands such as `status` and `tail` find a running network."""
    description = {
        "network": run.network.name,
        "address": run.server.address,
        "pid": os.getpid(),
        "deployment": run.deployment,
        "app": run.app,
        "cwd": os.getcwd(),
        "options": asdict(run.options),
    }
    path = os.path.join(run.storage, "run.json")
    with open(path + ".tmp", "w") as file:
        json.dump(description, file)
    os.replace(path + ".tmp", path)
