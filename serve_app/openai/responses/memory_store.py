"""The store itself, in the memory of one process. Everything in it runs on one event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from serve_app.dated_ids import made_at
from serve_app.openai.responses.store import FoundItems, History, StoredResponse, StoreLimits


@dataclass(slots=True)
class _Conversation:
    """All responses that grew from one root, branches included: they are kept and forgotten together."""

    last_used: float
    responses: dict[str, StoredResponse] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """`until`: it counts as gone then, unless its holder has come again."""

    response: StoredResponse
    cancelled_shown: str
    until: float = 0.0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryResponseStore:
    """Implements `ResponseStore`. Conversations stand in order of last use, oldest first.

    bytes   size of all that is kept, about
    """

    def __init__(
        self,
        limits: StoreLimits,
        lease_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lease_seconds`: a `hold` ends after this time, and its holder has as long again to call it anew. For
        holders in other processes, since nobody tells when one of them has died. None: it ends with its iterator
        only."""
        self._limits = limits
        self._begun = time.time() - 0.001  # ids tell whole milliseconds
        self._lease = lease_seconds
        self._clock = clock
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()  # by the id of the root
        self._roots: dict[str, str] = {}  # response -> root
        self._makers: dict[str, str] = {}  # item -> the response that has it in its output
        self.bytes = 0
        self._running: OrderedDict[str, _Running] = OrderedDict()  # in order of `until`

    async def hold(self, running: StoredResponse, cancelled: str) -> AsyncGenerator[bool, None]:
        self._expire()
        # It is there already if its holder comes again; then nothing that happened meanwhile is lost.
        held = self._running.setdefault(running.id, _Running(running, cancelled))
        held.until = math.inf if self._lease is None else self._clock() + 2 * self._lease
        self._running.move_to_end(running.id)
        comes_again = False
        try:
            yield False
            try:
                async with asyncio.timeout(self._lease):
                    await held.cancelled.wait()
            except TimeoutError:
                comes_again = True
                return
            yield True
        finally:
            if not comes_again:
                self._running.pop(running.id, None)

    async def put(self, stored: StoredResponse) -> None:
        self._forget(stored.id)
        # Where the one before has gone in the meantime, this one begins a conversation that has no history.
        root = self._roots.get(stored.previous or "", stored.id)
        conversation = self._conversations.setdefault(root, _Conversation(0.0))
        conversation.responses[stored.id] = stored
        self._roots[stored.id] = root
        self._makers |= {item.id: stored.id for item in stored.items}
        self.bytes += stored.bytes
        self._use(root)
        while len(self._roots) > self._limits.max_responses or self.bytes > self._limits.max_bytes:
            self._forget_conversation(next(iter(self._conversations)))

    async def get(self, tenant: str, response_id: str) -> str | None:
        running = self._find_running(tenant, response_id)
        if running is not None:
            return running.response.shown
        response = self._find(tenant, response_id)
        return None if response is None else response.shown

    async def history(self, tenant: str, response_id: str, most_bytes: int) -> History | None:
        chain, missing = self._chain(tenant, response_id)
        if missing is not None:
            return None
        last = chain[0]
        messages = tuple(message for turn in reversed(chain) for message in (*turn.messages, turn.answer))
        size = sum(message.bytes for message in messages)
        return History(last.session_id, messages if size <= most_bytes else (), size)

    def _chain(self, tenant: str, response_id: str) -> tuple[list[StoredResponse], str | None]:
        """A response and those before it, latest first, and the id of the first that is not kept."""
        last = self._find(tenant, response_id)
        if last is None:
            return [], response_id
        responses = self._conversations[self._roots[last.id]].responses
        chain = [last]
        while (previous := chain[-1].previous) is not None:
            if previous not in responses:
                return chain, previous
            chain.append(responses[previous])
        return chain, None

    async def lost(self, tenant: str, some_id: str) -> bool:
        _, missing = self._chain(tenant, some_id)
        seconds = made_at(missing or some_id)
        return seconds is not None and seconds < self._begun

    async def items(self, tenant: str, item_ids: Sequence[str], most_bytes: int) -> FoundItems:
        texts: list[str] = []
        size, session_id = 0, None
        for item_id in item_ids:
            response = self._find(tenant, self._makers.get(item_id, ""))
            if response is None:
                return FoundItems(missing=item_id)
            text = next(response.shown[item.begin : item.end] for item in response.items if item.id == item_id)
            size, session_id = size + len(text.encode()), response.session_id
            if size <= most_bytes:
                texts.append(text)
        return FoundItems(tuple(texts) if size <= most_bytes else (), size, session_id=session_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        if self._find(tenant, response_id) is None:
            return False
        self._forget(response_id)
        return True

    async def cancel(self, tenant: str, response_id: str) -> str | None:
        running = self._find_running(tenant, response_id)
        if running is None:
            return None
        running.cancelled.set()
        # It is to be found at every moment: its process puts what it has of the text in this one's place.
        await self.put(replace(running.response, shown=running.cancelled_shown))
        return running.cancelled_shown

    def _find_running(self, tenant: str, response_id: str) -> _Running | None:
        self._expire()
        running = self._running.get(response_id)
        if running is None or running.response.tenant != tenant or running.cancelled.is_set():
            return None
        return running

    def _find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A kept response; its conversation counts as used."""
        self._expire()
        root = self._roots.get(response_id)
        if root is None:
            return None
        response = self._conversations[root].responses[response_id]
        if response.tenant != tenant:
            return None
        self._use(root)
        return response

    def _use(self, root: str) -> None:
        self._conversations[root].last_used = self._clock()
        self._conversations.move_to_end(root)

    def _expire(self) -> None:
        now = self._clock()
        while self._running and next(iter(self._running.values())).until < now:
            self._running.popitem(last=False)
        horizon = now - self._limits.max_idle_seconds
        while self._conversations:
            root, oldest = next(iter(self._conversations.items()))
            if oldest.last_used >= horizon:
                return
            self._forget_conversation(root)

    def _forget(self, response_id: str) -> None:
        root = self._roots.pop(response_id, None)
        if root is None:
            return
        conversation = self._conversations[root]
        forgotten = conversation.responses.pop(response_id)
        self.bytes -= forgotten.bytes
        for item in forgotten.items:
            del self._makers[item.id]
        if not conversation.responses:
            del self._conversations[root]

    def _forget_conversation(self, root: str) -> None:
        for response_id in list(self._conversations[root].responses):
            self._forget(response_id)
