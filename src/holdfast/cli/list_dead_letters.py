"""`holdfast dead-letters`: lists the rows that a source rejected, running or not."""

from __future__ import annotations

import json
import os
import sys

from holdfast.edge.dead_letters import read_dead_letters
from holdfast.errors import InputError
from holdfast.runtime.folders import source_folder
from holdfast.storage import read_only


def dead_letters(storage: str, source: str, last: int | None, *, as_json: bool) -> int:
    folder = source_folder(storage, source)
    if not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        sources = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
        raise InputError(
            f"there is no source {source!r} in {storage} (sources: {', '.join(sources) or 'none'})"
        )
    table = read_dead_letters(read_only(folder), source, last)
    rows = [] if table is None else table.to_pylist()
    for row in rows:
        text = {name: str(value) for name, value in row.items() if value is not None}
        print(json.dumps(row, default=str) if as_json else
              "  ".join(f"{name}={value}" for name, value in text.items()))  # fmt: skip
    if not rows:
        print(f"source {source}: no dead letters", file=sys.stderr)
    elif last is not None and len(rows) == last:
        print(f"showing the newest {last} rows; -n 0 shows all", file=sys.stderr)
    return 0
