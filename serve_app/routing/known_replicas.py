"""What one process knows of a deployment's replicas, shared by its routers and its clients.

Routers say which replicas are running; a client that watches over its turns says which of them give no sign of life.
Routers run on threads of their own, so every change is made under a lock, and what is read is immutable.
"""

from __future__ import annotations

import threading
from collections.abc import Collection


class KnownReplicas:
    """Replicas by their unique id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running: frozenset[str] = frozenset()
        self.silent: frozenset[str] = frozenset()
        """Of the running ones, those that new turns should avoid: they do not answer, or their engine has failed."""

    def set_running(self, replicas: Collection[str]) -> None:
        with self._lock:
            self.running = frozenset(replicas)
            self.silent &= self.running

    def set_silent(self, replica: str, silent: bool) -> bool:
        """Whether this is news."""
        with self._lock:
            before = self.silent
            self.silent = before | {replica} if silent and replica in self.running else before - {replica}
            return self.silent != before


_known: dict[tuple[str, str], KnownReplicas] = {}


def known_replicas(application: str, deployment: str) -> KnownReplicas:
    """The one of this process."""
    return _known.setdefault((application, deployment), KnownReplicas())
