"""Complete runs in one process that recover from eventual checkpoints (CEC)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine.session import Sessions
from holdfast.errors import InputError
from holdfast.storage.rows import digest
from tests.processes.kill_app import totals
from tests.spark.test_running import WIDTH_US, rows, wait_for

#: The run is stopped before each of these buckets, and ends with the last one.
ENDS = (4, 9, 10, 17, 30)
#: Buckets without rows, some of them the first ones after a stop.
QUIET = (9, 16, 17, 18)


def push(run: hf.Run, lo: int, hi: int) -> None:
    for bucket in range(lo, hi):
        if bucket not in QUIET:
            run.source("s").push(rows(bucket))
        run.source("s").advance((bucket + 1) * WIDTH_US)


def network(recovery: Any = "cec", **limits: Any) -> hf.Network:
    net = hf.Network("footprints", bucket="100ms")
    source = net.source("s", "ts timestamp, key string, x double", time="ts", clock="manual")
    net.output("counts", source.filter("x > 0.1").count_window(7, by="key").agg(x=hf.sum("x")))
    net.output(
        "totals",
        source.stateful(totals, key="key", state="key string, total long",
                        out="key string, total long, ts timestamp"),
    )  # fmt: skip
    net.protect("main", recovery=recovery, **limits)
    return net


def results(
    net: hf.Network, storage: Path, options: hf.Options | None = None
) -> tuple[dict[str, tuple[int, str]], list[Any]]:
    """The results of all outputs of a run that is stopped several times, and the status of its node
    before each stop."""
    tables: dict[str, list[pa.Table]] = {output.name: [] for output in net.outputs}
    statuses, lo = [], 0
    for hi in ENDS:
        with hf.run(net, storage=str(storage), options=options) as run:
            push(run, lo, hi)
            lo = hi
            clients = {name: run.client(name) for name in tables}
            if hi == ENDS[-1]:
                run.source("s").end()
            readers = [
                threading.Thread(
                    target=client.foreach_bucket,
                    args=(lambda table, info, name=name: tables[name].append(table),),
                )
                for name, client in clients.items()
            ]
            for reader in readers:
                reader.start()
            for client in clients.values():
                wait_for(lambda client=client, hi=hi: (client.position or -1) >= hi - 1)
            statuses.append(run.nodes["main"].status())
            for client in clients.values():
                client.close()
            for reader in readers:
                reader.join()
    found = {name: pa.concat_tables(parts) for name, parts in tables.items()}
    return {name: (table.num_rows, digest(table)) for name, table in found.items()}, statuses


@pytest.fixture(scope="module")
def expected(
    sessions: Sessions, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    return results(network("checkpoint"), tmp_path_factory.mktemp("expected"))[0]


@pytest.mark.parametrize("limits", [{}, {"recovery_rows": 60}, {"recovery_entries": 8}])
def test_restarts_from_eventual_checkpoints_give_the_same_bits(
    expected: dict[str, tuple[int, str]], tmp_path: Path, limits: dict[str, int]
) -> None:
    found, _ = results(network(**limits), tmp_path)
    assert found == expected


def test_recovery_is_predicted_and_measured(
    expected: dict[str, tuple[int, str]], tmp_path: Path
) -> None:
    found, statuses = results(network(recovery_time="2s"), tmp_path)
    assert found == expected
    shown = [path["footprints"] for s in statuses for path in s["paths"].values()]
    assert all(one["recovery_ms_stated"] == 2_000 for one in shown)
    assert all(one["recovery_ms_predicted"] > 0 for one in shown)
    measured = [one["recovery_ms_last"] for one in shown]
    assert measured[0] is None, "the first run has not recovered"
    assert all(took > 0 for took in measured[1:] if took is not None) and any(measured[1:])


def test_a_source_without_rows_does_not_hold_back_recovery(tmp_path: Path) -> None:
    """Keys whose rows came long ago need none of the inputs since."""
    net = hf.Network("idle", bucket="100ms")
    schema = "ts timestamp, key string, x double"
    busy, idle = (net.source(name, schema, time="ts", clock="manual") for name in ("s", "t"))
    windows = [source.count_window(50, by="key").agg(n=hf.count()) for source in (busy, idle)]
    net.output("both", net.union(*windows))
    net.protect("main", recovery="cec", recovery_rows=60)
    with hf.run(net, storage=str(tmp_path)) as run:
        client = run.client("both")
        threading.Thread(
            target=client.foreach_bucket, args=(lambda table, info: None,), daemon=True
        ).start()
        for bucket in range(25):
            run.source("s").push(rows(bucket))
            if bucket == 0:
                run.source("t").push(rows(bucket))
            for name in ("s", "t"):
                run.source(name).advance((bucket + 1) * WIDTH_US)
            wait_for(lambda bucket=bucket: client.position in (bucket, bucket + 1))
        (path,) = run.nodes["main"].status()["paths"].values()
        client.close()
    assert path["checkpoint"] > 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recovery": "checkpoint", "recovery_rows": 5}, "expects recovery='cec', found"),
        ({"recovery": "cec", "recovery_rows": 0}, "an integer >= 1"),
        ({"recovery": "cec", "reconcile": "undo"}, "use reconcile='checkpoint'"),
        ({"recovery": "checkpoint", "recovery_time": "2s"}, "expects recovery='cec', found"),
        ({"recovery": "cec", "recovery_time": "soon"}, "recovery_time"),
        ({"recovery": "cec", "recovery_time": "1ms"}, "expected at least 100ms"),
        ({"recovery": "cec", "recovery_time": "2s", "recovery_rows": 5}, "only one of them"),
        ({"recovery": "cec", "replicas": 2, "replication": "pairs"}, "rebuilt from its peer"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hf.Network("n").protect("main", **options)
