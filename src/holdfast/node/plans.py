"""What `core.progress` has to know about a path and its state."""

from __future__ import annotations

from holdfast.core.policy import policy_of
from holdfast.core.progress_events import PathPlan
from holdfast.engine.state import Version
from holdfast.model.fragments import Path
from holdfast.model.network import Network
from holdfast.model.trees import tree_of
from holdfast.node.input_index import InputIndex


def plan_of(path: Path, network: Network, fragment: str, peers: tuple[str, ...]) -> PathPlan:
    stateful = sum(op.stateful for op in path.operators)
    extent = -(-path.extent_us() // network.width_us) + stateful
    trees = {output: tree_of(path, output, network) for output in path.outputs}
    policy = policy_of(network, fragment, peers)
    return PathPlan(path.name, path.inputs, path.outputs, path.convergent, extent, policy, trees)


def horizon(path: Path, version: Version, inputs: InputIndex, extent: int, width_us: int) -> int:
    """Last bucket that may have results without further input, from open windows or timers."""
    held = [inputs.last(stream) for stream in path.inputs]
    chunks = [c.hi for held in (*version.panes.values(), *version.edges.values()) for c in held]
    last = max([*(bucket for bucket in held if bucket is not None), *chunks], default=None)
    upto = version.bucket if last is None else max(version.bucket, last + extent)
    timers = version.timers_us()
    return max([upto, *([min(timers) // width_us + extent] if timers else [])])
