"""`dataclass` for frozen values that are made by the thousand: every event, action and message.

The `__init__` of a frozen dataclass calls `object.__setattr__` for each field, which takes several
times as long as assigning it, and came to a tenth of what a simulated run takes. So values are
frozen for the type checker, which refuses an assignment before anything runs; at run time they are
with `python -X dev` only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses

    def dataclass(cls: type | None = None, /, **how: Any) -> type | Callable[[type], type]:
        if how.get("frozen") and not sys.flags.dev_mode:
            del how["frozen"]
            how["unsafe_hash"] = how.get("eq", True)  # by value, as frozen ones have it
        return dataclasses.dataclass(cls, **how)
