"""Kill a process together with its JVM and Python workers."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL the group that `start_new_session` created, and wait for its leader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
