"""Executors get the code of the application, also that of modules which its functions use."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from pyspark import cloudpickle

import holdfast as hf
from holdfast.engine.compiled import send_by_value

APP = """
import holdfast as hf
import app_helpers
from app_totals import totals


def running(state, rows, info, *, scale=1):
    return totals(state, rows, app_helpers.scaled(scale))
"""


def test_modules_that_a_function_uses_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_main.py").write_text(APP)
    (tmp_path / "app_helpers.py").write_text("def scaled(x):\n    return 2 * x\n")
    (tmp_path / "app_totals.py").write_text("def totals(state, rows, x):\n    return rows, state\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import app_main  # type: ignore[import-not-found]

    names = {"app_main", "app_helpers", "app_totals"}
    try:
        net = hf.Network("sent", bucket="100ms")
        rows = net.source("a", "ts timestamp, k string", time="ts")
        net.output(
            "out",
            rows.stateful(partial(app_main.running, scale=3), key="k", state="k string, n long",
                          out="k string, n long, ts timestamp"),
        )  # fmt: skip
        send_by_value(net)
        registered = cloudpickle.list_registry_pickle_by_value()
        assert names <= registered
        assert not {name for name in registered if name.startswith(("holdfast", "pyarrow"))}
    finally:
        for name in names:
            cloudpickle.unregister_pickle_by_value(sys.modules.pop(name))
