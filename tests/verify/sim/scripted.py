"""What tests of two drivers put in the place of the transport: it says what the script says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Any

from holdfast.errors import HoldfastError, TransportError

#: Nothing of a test takes that long, unless something is wrong.
LIMIT_S = 20.0


class Replies:
    """Threads wait for the replies to their questions; equal questions in any order."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, queue.Queue[Any]] = {}
        self._lock = threading.Lock()

    def to(self, *question: Hashable) -> queue.Queue[Any]:
        with self._lock:
            return self._queues.setdefault(question, queue.Queue())

    def wait(self, *question: Hashable) -> Any:
        reply = self.to(*question).get(timeout=LIMIT_S)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def close(self) -> None:
        """Threads that still wait end."""
        with self._lock:
            for replies in self._queues.values():
                for _ in range(8):
                    replies.put(TransportError("over"))
