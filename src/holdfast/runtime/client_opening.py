"""Opens the clients of a run. Each client reads one output and has its own position."""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING

from holdfast.edge.client import Client
from holdfast.errors import InputError
from holdfast.model.trees import client_tolerance_buckets
from holdfast.runtime.folders import client_folder, client_names

if TYPE_CHECKING:
    from holdfast.runtime.running import Run


_NAME = re.compile(r"[A-Za-z0-9_-]+")


def announce_clients(run: Run) -> None:
    """Declare the durable clients of earlier runs as consumers: their rows are retained until they
    return, also by a node that is rebuilt."""
    for output, clients in client_names(run.storage).items():
        run.service.consumers.setdefault(output, set()).update(clients)


def open_client(
    run: Run, output: str, *, tentative: bool, durable: bool | None, name: str | None
) -> Client:
    names = [op.name for op in run.network.outputs]
    if output not in names:
        raise InputError(f"there is no output {output!r} (outputs: {', '.join(names)})")
    if name is not None and not _NAME.fullmatch(name):
        raise InputError(f"name={name!r}: expected letters, digits, '_' and '-' only")
    persistent = (not run.temporary) if durable is None else durable
    consumer = f"client-{output}" if name is None else f"client-{output}+{name}"
    for former in [c for c in run.clients if c.output == output and c.closed]:
        former.release()
        run.clients.remove(former)
    taken = {client.name for client in run.clients}
    if consumer in taken and (persistent or name is not None):
        raise InputError(
            f"this run already has a client of {output!r}"
            + (f" with name={name!r}" if name is not None else "")
            + "; close() that client first, or give the new client its own name="
        )
    # A further client that is not durable only watches: nothing is retained for it, and it releases
    # nothing that a durable client needs.
    watches = not persistent and (consumer in taken or not run.temporary)
    if watches:
        consumer = next(name for n in count(1) if (name := f"{consumer}~{n}") not in taken)
    folder = client_folder(run.storage, output if name is None else f"{output}+{name}")
    log = run.open_log(folder, consumer) if persistent else None
    client = Client(
        output, run.producers(output, consumer), run.network.width_us, log=log,
        name=consumer, tentative=tentative, acknowledges=not watches,
        tolerance_buckets=client_tolerance_buckets(run.network, output),
    )  # fmt: skip
    if not watches:
        run.service.consumers.setdefault(output, set()).add(client.name)
    run.clients.append(client)
    run.failures.tell()
    return client
