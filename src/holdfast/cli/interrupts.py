"""Ctrl-C and SIGTERM: the first signal stops a run cleanly, the second kills everything at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.runtime.running import Run

#: The exit code that a shell reports for SIGINT.
INTERRUPTED = 130
STOPPING = b"stopping (press Ctrl-C again to end at once)\n"


class Interrupts:
    """Context manager that handles both signals. `kill` sends SIGKILL to all started processes. It
    must not take a lock, because the interrupted code may hold it."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._stopping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        #: A copy of standard error: during the start of a JVM, descriptor 2 is the log of the JVM.
        self._terminal = os.dup(2)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._interrupted)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._terminal)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._kill()
            os._exit(INTERRUPTED)
        self._stopping = True
        os.write(self._terminal, STOPPING)
        raise KeyboardInterrupt


def kill_all(started: Sequence[Run]) -> None:
    """Kill the processes of the runs, and the JVM of this process if there is one."""
    for run in started:
        run.kill()
    if "holdfast.engine.session" in sys.modules:
        from holdfast.engine import session

        session.end_jvm()
