"""In a REPL or notebook, objects show what they are and what to do next. No JVM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InputError


def network() -> tuple[hf.Network, hf.Stream]:
    net = hf.Network("clicks", bucket="500ms")
    return net, net.source("clicks", "ts timestamp, page string", time="ts")


def test_repr_describes_an_object_and_the_next_step(tmp_path: Path) -> None:
    net, clicks = network()
    assert repr(net) == "<Network 'clicks': sources clicks; outputs none>"
    assert repr(clicks) == "<Stream 'clicks' of network 'clicks'>"
    window = clicks.window("10s")
    assert repr(window) == "<window of 10s; finish it with .agg(...) or .apply(fn)>"
    counted = clicks.count_window(3, by="page")
    assert repr(counted) == "<window of 3 rows; finish it with .agg(...)>"
    net.output("pages", window.group_by("page").agg(n=hf.count()))
    assert "outputs pages" in repr(net)
    run = hf.run(net, storage=str(tmp_path))
    assert repr(run).startswith("<Run of network 'clicks' (local), not started: use `with hf.run(")


@pytest.mark.parametrize(
    "ask",
    [lambda run: run.source("clicks"), lambda run: run.client("pages"), lambda run: run.status()],
    ids=["source", "client", "status"],
)
def test_a_run_that_is_not_started_refuses_calls_with_the_remedy(
    ask: Callable[[hf.Run], Any], tmp_path: Path
) -> None:
    net, clicks = network()
    net.output("pages", clicks.filter("page <> ''"))
    with pytest.raises(InputError, match=r"the run is not started: .* or call run.start\(\)"):
        ask(hf.run(net, storage=str(tmp_path)))
