"""Descendants of a command that end with it, also those whose own parent has ended before.

What a process that has ended had started is adopted by the next ancestor that asks for it, else by the system's first
process, where nobody finds it again. On Linux a command asks for it, and so has to reap what it adopts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Collection

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process. Does nothing where the system has no such
    thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_adopted(own: Collection[int]) -> None:
    """Lets go of children that have ended, but for `own`, whose starters ask how they ended."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def kill_descendants(patience: float) -> None:
    """Ends them all, and returns when they have ended, after `patience` seconds at the latest."""
    deadline = time.monotonic() + patience
    # Again and again: one may have started another in the meantime.
    while (alive := psutil.Process().children(recursive=True)) and (rest := deadline - time.monotonic()) > 0:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=rest)
