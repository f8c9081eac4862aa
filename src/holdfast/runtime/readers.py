"""Clients of a run: each is a reader of an output with a position of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.edge.client import Client
from holdfast.errors import InputError
from holdfast.model.trees import client_tolerance_buckets
from holdfast.runtime.folders import client_folder

if TYPE_CHECKING:
    from holdfast.runtime.running import Run


def open_client(
    run: Run, output: str, *, tentative: bool, durable: bool | None, name: str | None
) -> Client:
    names = [op.name for op in run.network.outputs]
    if output not in names:
        raise InputError(f"there is no output {output!r} (outputs: {', '.join(names)})")
    for former in [c for c in run.clients if c.output == output and c.closed]:
        former.release()
        run.clients.remove(former)
    keep = (not run.temporary) if durable is None else durable
    log = run.open_log(client_folder(run.storage, output), f"client-{output}") if keep else None
    reader = name or f"client-{output}"
    client = Client(
        output, run.makers(output, reader), run.network.width_us, log=log,
        name=reader, tentative=tentative,
        tolerance_buckets=client_tolerance_buckets(run.network, output),
    )  # fmt: skip
    run.service.readers.setdefault(output, set()).add(client.name)
    run.clients.append(client)
    run.failures.tell()
    return client
