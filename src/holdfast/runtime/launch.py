"""`hf.run`: creates the run of a network."""

from __future__ import annotations

from holdfast.config import Options
from holdfast.model.network import Network
from holdfast.runtime.running import Deployment, Run


def run(
    network: Network,
    *,
    storage: str | None = None,
    deployment: Deployment = "local",
    options: Options | None = None,
    app: str | None = None,
    accept_versions: bool = False,
) -> Run:
    """Run a network: `with hf.run(net, storage="data") as run: ...`

    storage: folder of the logs; a run on the same folder continues where the last one stopped. By
        default a temporary folder, deleted when the run stops.
    deployment: `"local"`: everything runs in this process. `"processes"`: supervised host
        processes, one per node unless `Options.hosts` is set.
    options: how the network is run; see `Options`.
    app: for `"processes"`, where each process finds the network: `"path.py"` or `"module:network"`.
    accept_versions: continue on a storage that was written with other versions of libraries.
    """
    return Run(
        network, storage=storage, deployment=deployment, options=options, app=app,
        accept_versions=accept_versions,
    )  # fmt: skip
