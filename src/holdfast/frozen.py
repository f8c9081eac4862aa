"""A fast `dataclass` for frozen values that are created in large numbers, such as events.

The `__init__` of a frozen dataclass calls `object.__setattr__` for each field, which takes several
times as long as an assignment and took a tenth of the time of a simulated run. Values are therefore
frozen for the type checker, which rejects assignments statically. At run time they are frozen only
with `python -X dev`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses

    def dataclass(cls: type | None = None, /, **options: Any) -> type | Callable[[type], type]:
        if options.get("frozen") and not sys.flags.dev_mode:
            del options["frozen"]
            # Hash by value, like a frozen dataclass.
            options["unsafe_hash"] = options.get("eq", True)
        return dataclasses.dataclass(cls, **options)
