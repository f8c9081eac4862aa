"""Starts the nodes of a local run in its own process: one JVM, one engine per fragment, no
replicas."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from holdfast.model.partitions import one_of_each

if TYPE_CHECKING:
    from holdfast.runtime.running import Run


def start_nodes(run: Run) -> None:
    """Create all nodes, warm up their code, then start them."""
    # Imported late: only the local deployment needs a JVM in this process.
    from holdfast.engine import session
    from holdfast.engine.compiled import compile_network
    from holdfast.engine.engine import Engine
    from holdfast.node.node import Node
    from holdfast.runtime.folders import node_folder

    network, storage = run.network, run.storage
    sessions = session.start(
        run.options, name=f"holdfast-{network.name}", jvm_log=os.path.join(storage, "spark.log")
    )
    compiled = compile_network(network, sessions.small)
    for fragment in run.fragments:
        name = fragment.name
        log = run.open_log(node_folder(storage, name), name, archive=False)
        engine = Engine(network, sessions, os.path.join(str(log.root), "state"), compiled=compiled)
        upstream = {stream: run.producers(stream, name) for stream in fragment.inputs}
        node = Node(name, fragment, engine, log, run.service, upstream, run.options)
        node.failed = partial(run.failures.report, name)
        run.nodes[name] = node
    for name in one_of_each(network, run.nodes):
        for path in run.nodes[name].fragment.paths:
            run.nodes[name].engine.warm_up(path)
    for node in run.nodes.values():
        node.start()
