"""What one process remembers of where conversations are: it sent them there, and replicas report it only later.

A call is noted when a replica is chosen for it, before that has taken it, so that turns of one name that come together
go to one replica; and it is forgotten when it has ended. Where the last one went is kept longer, for as many keys as
there is room. Serve tells of the end of calls on threads of its own, so every change is made under a lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable


class Homes:
    """Replicas by their unique id, of conversations by their routing key."""

    def __init__(self, size: int = 50_000) -> None:
        """`size`: keys whose last replica is remembered; that of the key used longest ago is forgotten first."""
        self.size = size
        self._lock = threading.Lock()
        self._last: OrderedDict[str, str] = OrderedDict()
        self._keys: dict[str, str] = {}  # of calls that have not ended
        self._open: dict[str, dict[str, str]] = {}  # key to call to replica

    def choose(self, key: str, call: str, replica: str) -> None:
        """A call is on its way there; if it was on its way elsewhere, it is not any more."""
        with self._lock:
            self._keys[call] = key
            self._open.setdefault(key, {})[call] = replica

    def end(self, call: str) -> None:
        """A call that is not known is none of a conversation, or has ended."""
        with self._lock:
            if (key := self._keys.pop(call, None)) is not None:
                calls = self._open[key]
                del calls[call]
                if not calls:
                    del self._open[key]

    def note(self, key: str, replica: str) -> None:
        """The conversation is there from now on."""
        with self._lock:
            self._last[key] = replica
            self._last.move_to_end(key)
            while len(self._last) > self.size:
                self._last.popitem(last=False)

    def last(self, key: str) -> str | None:
        return self._last.get(key)

    def open(self, key: str) -> frozenset[str]:
        """Replicas where calls of the conversation are, or on their way to."""
        with self._lock:
            return frozenset(self._open.get(key, {}).values())

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Replicas that are no more."""
        with self._lock:
            for key in [key for key, replica in self._last.items() if gone(replica)]:
                del self._last[key]

    def __len__(self) -> int:
        """Keys whose last replica is remembered."""
        return len(self._last)

    @property
    def open_calls(self) -> int:
        return len(self._keys)
