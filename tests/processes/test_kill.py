"""SIGKILL of a node process at random moments, some of them with its storage deleted."""

from __future__ import annotations

import random
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from holdfast.config import Options
from holdfast.engine.session import Sessions
from holdfast.runtime.folders import node_folder
from holdfast.runtime.running import Run
from holdfast.verify.audit import audit
from tests.processes import kill_app

LIMIT_S = 120.0


def push(run: Run, stop: threading.Event) -> None:
    """One bucket of 20 rows per source every 200 ms, with a gap now and then."""
    bucket = 0
    while not stop.wait(0.2):
        for number, source in enumerate(run.sources.values()):
            rng = np.random.default_rng([bucket, number])
            if rng.random() < 0.9:
                source.push(
                    {"ts": rng.integers(bucket * 100_000, (bucket + 1) * 100_000, 20),
                     "key": np.char.add("k", rng.integers(0, 30, 20).astype(str)),
                     "x": rng.random(20) * 10.0 ** rng.integers(-9, 9, 20)}
                )  # fmt: skip
            source.advance((bucket + 1) * 100_000)
        bucket += 1
    for source in run.sources.values():
        source.end()


def wait_for(event: str, test: object, limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not test():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"{event}: not within {limit_s} s"
        time.sleep(0.02)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kills", "wipes"), [("net", 6, True), ("footprints", 4, False)])
def test_kills_lose_duplicate_or_change_no_rows(
    name: str, kills: int, wipes: bool, tmp_path: Path, sessions: Sessions
) -> None:
    rng, net = random.Random(20), getattr(kill_app, name)
    app = f"{Path(kill_app.__file__)}:{name}"
    storage = str(tmp_path / "storage")
    options = Options(memory="1g", checkpoint_buckets=10, java_options="-XX:TieredStopAtLevel=1")
    run = Run(net, storage=storage, deployment="processes", options=options, app=app)
    pids: set[int] = set()
    with run:
        clients = [run.client(output.name) for output in net.outputs]
        client_threads = [
            threading.Thread(target=client.foreach_bucket, args=(lambda table, info: None,))
            for client in clients
        ]
        for thread in client_threads:
            thread.start()
        stop = threading.Event()
        pusher = threading.Thread(target=push, args=(run, stop))
        pusher.start()
        process, folder = run.processes["main"], node_folder(storage, "main")
        for kill in range(kills):
            run.raise_failure()
            before = max((client.position or -1) for client in clients)
            wait_for(
                f"progress before kill {kill}",
                lambda before=before: min((c.position or -1) for c in clients) > before,
            )
            time.sleep(rng.random())
            pids.add(process.pid or 0)
            wipe = wipes and kill % 2 == 1
            process.kill(before_restart=partial(shutil.rmtree, folder) if wipe else None)
            wait_for("restart", lambda kill=kill: process.restarts == kill + 1)
        stop.set()
        pusher.join()
        for thread in client_threads:
            thread.join(timeout=LIMIT_S)
            assert not thread.is_alive()
        run.raise_failure()
        pids.add(process.pid or 0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    report = audit(net, storage, sessions.large)
    assert report.ok, report.text()
