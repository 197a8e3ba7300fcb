"""What one process knows of a deployment's replicas, shared by its routers and its clients.

Routers say which replicas are running, which are being stopped, and where they sent which conversation; a client that
watches over its turns says which of them give no sign of life.
Routers run on threads of their own, so every change is made under a lock, and what is read is immutable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection

from serve_app.cluster.routing.homes import Homes

Listener = Callable[[frozenset[str]], object]


class KnownReplicas:
    """Replicas by their unique id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running: frozenset[str] = frozenset()
        self.silent: frozenset[str] = frozenset()
        """Of the running ones, those that new turns should avoid: they do not answer, or their engine has failed."""

        self.leaving: frozenset[str] = frozenset()
        """Replicas that are not running any more, and may not be gone yet: they finish their turns."""

        self.homes = Homes()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Listener]] = []

    def set_running(self, replicas: Collection[str], leaving: Collection[str] = ()) -> None:
        with self._lock:
            running = self.running = frozenset(replicas)
            self.leaving = frozenset(leaving) - running
            self.silent &= running
            self._listeners = [pair for pair in self._listeners if not pair[0].is_closed()]
            for loop, listener in self._listeners:
                loop.call_soon_threadsafe(listener, running)

    def listen(self, listener: Listener) -> None:
        """From now on it is told who is running whenever that is reported, on the event loop of this call."""
        with self._lock:
            self._listeners.append((asyncio.get_running_loop(), listener))

    def set_gone(self, replica: str) -> None:
        """One that was being stopped."""
        with self._lock:
            self.leaving -= {replica}

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
