"""Every line of a node runs in a scheduler pool of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import holdfast as hf
from holdfast.engine import session
from holdfast.engine.session import Sessions


def test_each_path_has_a_pool(sessions: Sessions) -> None:
    net = hf.Network("pools", bucket="100ms")
    for name in ("a", "b"):
        rows = net.source(name, "ts timestamp, x long", time="ts", clock="manual")
        net.output(f"out-{name}", rows.filter("x > 0"))
    with hf.run(net) as run:
        for name in ("a", "b"):
            run.source(name).push({"ts": [0], "x": [1]})
            run.source(name).end()
        for name in ("a", "b"):
            assert [rows.num_rows for rows, _ in run.client(f"out-{name}")] == [1]
    pools = sessions.small.sparkContext._jsc.sc().getAllPools()
    names = [pools.apply(number).name() for number in range(pools.length())]
    state = os.path.join(run.storage, "nodes", "main", "state ")
    assert sum(name.startswith(state) for name in names) == 2, names


def test_executors_can_import_the_package_that_is_sent_to_them() -> None:
    script = "import holdfast.engine.keyed as module; print(module.__file__)"
    package = session._package()
    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": package},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stdout.startswith(package), found.stderr
