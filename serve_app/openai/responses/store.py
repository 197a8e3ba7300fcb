"""Responses that are kept on the server, so that a later turn can go on from one by its id alone.

Each holds what its own turn added and the id of the one before it, so a conversation of n turns takes n turns of
memory. All of it is plain data, since the store of an application is another process than its ingress.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

RECORD_BYTES = 512  # what a record costs besides its texts, about
MESSAGE_BYTES = 256  # and each message or call in it
ITEM_BYTES = 512  # and each item of its output, with the entry by which it is found


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store may hold, all conversations together.

    max_idle_seconds  a conversation that nobody went on with, or looked at, for longer is forgotten
    """

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20
    max_idle_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call of a tool. `arguments`: as the model or the client wrote them, nearly always a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class KeptMessage:
    """`calls` of an assistant's message; `call_id`: of a tool's, the call that it is the output of."""

    role: str
    text: str
    calls: tuple[KeptCall, ...] = ()
    call_id: str | None = None

    @property
    def bytes(self) -> int:
        texts = (self.text, *(text for call in self.calls for text in (call.id, call.name, call.arguments)))
        size = sum(len(text.encode()) for text in texts) + len((self.call_id or "").encode())
        return size + MESSAGE_BYTES * (1 + len(self.calls))


@dataclass(frozen=True, slots=True)
class KeptItem:
    """An item of a response's output: where in `shown` it stands, from `begin` to before `end`, in characters."""

    id: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the turn that made it.

    previous    id of the response that it goes on from
    session_id  the session whose resident cache holds the conversation
    messages    its own input
    answer      its output, as later turns have it
    shown       the response as clients see it, in JSON
    items       of its output, none while it is being written
    """

    id: str
    tenant: str
    previous: str | None
    session_id: str
    messages: tuple[KeptMessage, ...]
    answer: KeptMessage
    shown: str
    items: tuple[KeptItem, ...] = ()

    @property
    def bytes(self) -> int:
        spoken = sum(message.bytes for message in (*self.messages, self.answer))
        return RECORD_BYTES + len(self.shown.encode()) + spoken + ITEM_BYTES * len(self.items)


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to and including one response. `bytes`: its size, about; without messages it is too large."""

    session_id: str
    messages: tuple[KeptMessage, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class FoundItems:
    """Items of kept responses, as JSON, in the order asked for. `bytes`: their size; without texts they are too large.

    missing     the first id that no kept response has, and then nothing else is told
    session_id  the session of the response that has the last of them
    """

    texts: tuple[str, ...] = ()
    bytes: int = 0
    missing: str | None = None
    session_id: str | None = None


class ResponseStore(Protocol):
    """A tenant meets only its own responses: another's are as if they did not exist."""

    def hold(self, running: StoredResponse, cancelled: str) -> AsyncIterator[bool]:
        """Makes a response known that is still being written, for as long as the iterator is open. Gives False once
        it is known, and True if it is cancelled; then `cancelled` is what clients see of it."""
        ...

    async def put(self, stored: StoredResponse) -> None:
        """Keeps a response that is complete. Conversations that were not used for the longest time make place."""
        ...

    async def get(self, tenant: str, response_id: str) -> str | None:
        """The response as JSON, kept or still being written."""
        ...

    async def history(self, tenant: str, response_id: str, most_bytes: int) -> History | None:
        """None if this response, or any before it, is not kept. Of a conversation with more than `most_bytes` only the
        size."""
        ...

    async def items(self, tenant: str, item_ids: Sequence[str], most_bytes: int) -> FoundItems:
        """Items of the output of kept responses. They are gone with their response. Of more than `most_bytes` only the
        size."""
        ...

    async def lost(self, tenant: str, some_id: str) -> bool:
        """Of a response or an item that is not kept, or a response that has no history: whether it, or one that came
        before it, is older than this store. Each start of a store begins with nothing."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a kept response: nothing can go on from it or from those that came after it."""
        ...

    async def cancel(self, tenant: str, response_id: str) -> str | None:
        """Ends a response that is being written; gives it as JSON. None if no such one is."""
        ...
