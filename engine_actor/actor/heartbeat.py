"""What the owner thread leaves for others to read without asking it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

SNAPSHOT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What routers want to know, as of the last rounds."""

    sessions: Mapping[str, int] = field(default_factory=dict)  # tokens of those that are resident, by key
    open: frozenset[str] = frozenset()  # keys of those of which turns run or wait
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


@dataclass(slots=True)
class Heartbeat:
    """Written by the owner thread, read by others without asking it: its last round, the failure that ended it, and
    a snapshot that is at most SNAPSHOT_SECONDS older than the last round."""

    last_round: float = field(default_factory=time.monotonic)
    failure: BaseException | None = None
    snapshot: Snapshot = field(default_factory=Snapshot)
    snapshot_taken: float = 0.0
