"""Responses that are kept on the server, so that a later turn can go on from one by its id alone.

Each holds what its own turn added and the id of the one before it, so a conversation of n turns takes n turns of
memory. All of it is plain data, since the store of an application is another process than its ingress.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

RECORD_BYTES = 512  # what a record costs besides its texts, about


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store may hold, all conversations together.

    max_idle_seconds  a conversation that nobody went on with, or looked at, for longer is forgotten
    """

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20
    max_idle_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the turn that made it.

    previous    id of the response that it goes on from
    session_id  the session whose resident cache holds the conversation
    messages    (role, text) of its own input
    answer      the text of its output
    shown       the response as clients see it, in JSON
    """

    id: str
    owner: str
    previous: str | None
    session_id: str
    messages: tuple[tuple[str, str], ...]
    answer: str
    shown: str

    @property
    def bytes(self) -> int:
        texts = (self.answer, self.shown, *(text for _, text in self.messages))
        return RECORD_BYTES + sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to and including one response: (role, text) of every message."""

    session_id: str
    messages: tuple[tuple[str, str], ...]


class ResponseStore(Protocol):
    """An owner meets only its own responses: another's are as if they did not exist."""

    def hold(self, running: StoredResponse, cancelled: str) -> AsyncIterator[bool]:
        """Makes a response known that is still being written, for as long as the iterator is open. Gives False once
        it is known, and True if it is cancelled; then `cancelled` is what clients see of it."""
        ...

    async def put(self, stored: StoredResponse) -> None:
        """Keeps a response that is complete. Conversations that were not used for the longest time make place."""
        ...

    async def get(self, owner: str, response_id: str) -> str | None:
        """The response as JSON, kept or still being written."""
        ...

    async def history(self, owner: str, response_id: str) -> History | None:
        """None if this response, or any before it, is not kept."""
        ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a kept response: nothing can go on from it or from those that came after it."""
        ...

    async def cancel(self, owner: str, response_id: str) -> str | None:
        """Ends a response that is being written; gives it as JSON. None if no such one is."""
        ...
