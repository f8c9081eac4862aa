"""Before a read that may take long, the server sends a heartbeat."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from holdfast.storage import Log
from holdfast.streams.serving import Service
from holdfast.transport import flight as ours
from holdfast.transport import wire
from holdfast.types import SegmentId, Stability


@pytest.mark.parametrize(
    ("parts", "rows", "expected"),
    [
        (1, 10, ["segment", "boundary"]),
        (1, 11, ["alive", "segment", "boundary"]),
        (2, 1, ["alive", "segment", "alive", "segment", "boundary"]),
    ],
    ids=["small", "large", "several"],
)
def test_the_server_sends_a_heartbeat_before_a_long_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, rows: int, expected: list[str]
) -> None:
    monkeypatch.setattr(ours, "LONG_READ_ROWS", 10)
    log = Log.open(tmp_path / "log", "owner", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    table = pa.table({"ts": pa.array([0] * rows, pa.timestamp("us", tz="UTC"))})
    ids = [SegmentId("s", 0, 0, part=part) for part in range(parts)]
    log.commit("s", [log.write(table, id, Stability.STABLE) for id in ids], 0)
    server = ours.FlightServer(Service(logs={"s": log}))
    client = flight.FlightClient(f"grpc://{server.address}")
    request = wire.question("follow", wire.Follow("s", 0, False, None))
    _writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(request))
    kinds: list[str] = []
    while "boundary" not in kinds:
        chunk = reader.read_chunk()
        if chunk.data is None:
            body = bytes(chunk.app_metadata)
            kinds.append(wire.decode(body, "alive", "segment", "boundary")[0])
    reader.cancel()
    client.close()
    server.stop()
    log.close()
    assert kinds == expected
