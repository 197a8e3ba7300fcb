"""What waits for the reader of a turn, on his event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from engine_actor.messages import TurnDelta, TurnTokens


class Mailbox:
    """Deltas of one turn for one reader, on the event loop; None is the end. A reader that is behind finds the tokens
    of several steps as one."""

    def __init__(self) -> None:
        self._deltas: deque[TurnDelta | None] = deque()
        self._reader: asyncio.Future[None] | None = None  # he waits

    def put(self, deltas: list[TurnDelta | None]) -> None:
        for delta in deltas:
            last = self._deltas[-1] if self._deltas else None
            if isinstance(delta, TurnTokens) and isinstance(last, TurnTokens) and delta.choice == last.choice:
                tokens, logprobs = last.token_ids + delta.token_ids, last.logprobs + delta.logprobs
                self._deltas[-1] = TurnTokens(tokens, last.choice, logprobs)
            else:
                self._deltas.append(delta)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TurnDelta | None:
        while not self._deltas:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._deltas.popleft()
