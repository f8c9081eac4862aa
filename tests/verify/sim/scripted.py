"""Replaces the transport in the tests that compare two drivers: replies come from a script."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Any

from holdfast.errors import HoldfastError, TransportError

#: Time limit of a single wait; exceeded only if a test is broken.
LIMIT_S = 20.0


class Replies:
    """Threads wait for the replies to their requests; equal requests are answered in any order."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, queue.Queue[Any]] = {}
        self._lock = threading.Lock()

    def to(self, *request: Hashable) -> queue.Queue[Any]:
        with self._lock:
            return self._queues.setdefault(request, queue.Queue())

    def wait(self, *request: Hashable) -> Any:
        reply = self.to(*request).get(timeout=LIMIT_S)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def close(self) -> None:
        """Ends the threads that still wait."""
        with self._lock:
            for replies in self._queues.values():
                for _ in range(8):
                    replies.put(TransportError("over"))
