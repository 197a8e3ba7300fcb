"""Memory that this process may still take: the machine's, bounded by the control group it runs in."""

from __future__ import annotations

from pathlib import Path


def free_host_bytes() -> int:
    """Available bytes of main memory. Raises OSError where the system does not tell."""
    available = _meminfo_available()
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, limit - used)
    return max(0, available)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not state MemAvailable")


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
