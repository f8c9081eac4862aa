"""One of a pair is killed and loses its storage; it is made anew from its partner, which is then
killed in its turn (Flux, sections 3.2 and 3.3)."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from holdfast.audit import audit
from holdfast.config import Options
from holdfast.engine.session import Sessions
from holdfast.running import Run, node_folder
from tests.processes import pairs_app
from tests.processes.test_kill import wait_for

APP = str(Path(pairs_app.__file__)) + ":net"
WIDTH_US = 500_000


def push(run: Run, stop: threading.Event) -> None:
    source, bucket = run.source("tap"), 0
    while not stop.wait(0.8):
        rng = np.random.default_rng(bucket)
        source.push(
            {"ts": rng.integers(bucket * WIDTH_US, (bucket + 1) * WIDTH_US, 30),
             "key": np.char.add("k", rng.integers(0, 50, 30).astype(str)), "x": rng.random(30)}
        )  # fmt: skip
        source.advance((bucket + 1) * WIDTH_US)
        bucket += 1
    source.end()


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_each_of_a_pair_is_made_anew_from_the_other(tmp_path: Path, sessions: Sessions) -> None:
    storage = str(tmp_path / "storage")
    options = Options(memory="1g", by_reference=False)
    run = Run(pairs_app.net, storage=storage, deployment="processes", options=options, app=APP)
    with run:
        client = run.client("totals")
        reader = threading.Thread(target=client.foreach_bucket, args=(lambda table, info: None,))
        reader.start()
        stop = threading.Event()
        pusher = threading.Thread(target=push, args=(run, stop))
        pusher.start()

        def got_on(by: int) -> None:
            run.raise_failure()
            before = client.position or -1
            wait_for("results", lambda: (client.position or -1) >= before + by)

        got_on(5)
        for name in ("totals.0", "totals.0@2"):
            folder = node_folder(storage, name)
            run.processes[name].kill(before_restart=partial(shutil.rmtree, folder))
            wait_for(f"{name} to be killed", lambda name=name: run.processes[name].restarts == 1)
            got_on(3)  # its partner goes on

            def caught_up(name: str = name) -> bool:
                told = next(n for n in run.status()["nodes"] if n["node"] == name)
                path = next(iter(told.get("paths", {}).values()), {})
                return told.get("epoch") == 2 and path.get("state") == "STABLE"

            wait_for(f"{name} to be made anew", caught_up)
            log = Path(f"{folder}.log").read_text()
            assert "has the state of" in log, log[-2_000:]
            got_on(2)
        stop.set()
        pusher.join()
        reader.join(timeout=60)
        assert not reader.is_alive()
        run.raise_failure()
    report = audit(pairs_app.net, storage, sessions.large)
    assert report.ok, report.text()
    # Nothing is kept at the way in for what is long done: the partner's state is enough.
    assert client.position is not None and client.position > 15
