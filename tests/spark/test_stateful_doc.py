"""The example of docs/stateful.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.engine.session import Sessions
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import run_network

DOC = Path(__file__).parents[2] / "docs" / "stateful.md"
MS = 1_000


def test_a_card_that_rests_is_reported(sessions: Sessions) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    times = [100 * MS, 300 * MS, 1_200 * MS, 2_400 * MS, 9_000 * MS, 10_900 * MS]
    rows = pa.table(
        {"ts": pa.array(times, TIMESTAMP), "card": ["a", "a", "b", "a", "c", "c"],
         "amount": [10, 20, 5, 1, 7, 8]}
    )  # fmt: skip
    found = run_network(names["net"], {"uses": rows}, sessions, groups=(1, 3), extra_buckets=6)
    # At 2.3 s, card a has rested for two seconds; its use in the same bucket begins another
    # session. Card c is used before its deadline in that bucket.
    assert sorted(map(tuple, (row.values() for row in found["sessions"].to_pylist())), key=str) == (
        sorted(
            [("a", 2, 30, at(2_300)), ("b", 1, 5, at(3_200)), ("a", 1, 1, at(4_400)),
             ("c", 2, 15, at(12_900))], key=str,
        )
    )  # fmt: skip


def at(ms: int) -> Any:
    return pa.scalar(ms * MS, TIMESTAMP).as_py()
