"""CPU time by process of a server and all that it has started, which means something on a busy machine too."""

from __future__ import annotations

import contextlib
from collections import Counter

import psutil


def cpu_seconds(pid: int) -> Counter[str]:
    """User and system seconds since each process started, by what the process is."""
    seconds: Counter[str] = Counter()
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds["server" if process == root else _role(process)] += times.user + times.system
    return seconds


def _role(process: psutil.Process) -> str:
    """Ray names its actors' processes; of Serve's replicas by their deployment."""
    title = " ".join(process.cmdline()).strip()
    if title.startswith("ray::ServeReplica:"):
        return title.rpartition(":")[2]
    for name in ("ProxyActor", "HAProxyManager", "haproxy", "ServeController", "raylet", "gcs_server"):
        if name in title.partition("ray::")[2] or name in process.name():
            return name
    return "others"
