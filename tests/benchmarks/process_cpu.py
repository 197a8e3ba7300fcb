"""CPU time by process of a server and all that it has started, which means something on a busy machine too."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping

import psutil


def cpu_seconds(pid: int) -> dict[str, float]:
    """User and system seconds since each process started, by what the process is."""
    seconds: dict[str, float] = defaultdict(float)
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds["server" if process == root else _role(process)] += times.user + times.system
    return seconds


def cpu_seconds_since(before: Mapping[str, float], pid: int) -> dict[str, float]:
    """What was used since `before`, without those that used nothing."""
    spent = {role: now - before.get(role, 0.0) for role, now in cpu_seconds(pid).items()}
    return {role: seconds for role, seconds in spent.items() if seconds > 0}


def _role(process: psutil.Process) -> str:
    """Ray names its actors' processes; of Serve's replicas by their deployment."""
    title = " ".join(process.cmdline()).strip()
    if title.startswith("ray::ServeReplica:"):
        return title.rpartition(":")[2]
    for name in ("ProxyActor", "HAProxyManager", "haproxy", "ServeController", "raylet", "gcs_server"):
        if name in title.partition("ray::")[2] or name in process.name():
            return name
    return "others"
