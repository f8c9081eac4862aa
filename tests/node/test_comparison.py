"""A replica whose results were refuted never continues with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import holdfast as hf
from holdfast.core.divergence import Refute
from holdfast.errors import Refuted
from holdfast.model.fragments import fragments
from holdfast.node.comparison import Comparison
from holdfast.node.node_events import Carrier
from holdfast.storage import Log


def compared(log: Log) -> Comparison:
    net = hf.Network("one", bucket="1s")
    net.output("out", net.source("s", "ts timestamp", time="ts").filter("true"))
    return Comparison("main", fragments(net)[0], log, cast(Carrier, None), replicas=2)


def test_a_refutation_survives_a_restart_for_another_reason(tmp_path: Path) -> None:
    """The storage must be moved aside first; the process that decided this may be gone."""
    log = Log.open(tmp_path, "main", fsync="never")
    actions: Any = [Refute("its recomputation gives the result of its peer")]
    with pytest.raises(Refuted, match="gives the result of its peer"):
        compared(log)._perform(actions, 0, {})
    log.close()
    log = Log.open(tmp_path, "main", fsync="never")
    with pytest.raises(Refuted, match="has refuted the results in its storage"):
        compared(log)
    log.close()
