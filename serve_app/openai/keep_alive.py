"""Comments in a stream of events that has nothing to say.

An answer may pause for long: its prompt is being computed, or its replica is lost and another one starts. Proxies take
a connection on which nothing passes for dead, after a minute as a rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

KEEP_ALIVE_SECONDS = 15.0
COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """A context manager: within it `write` sends events, and a comment goes out where it has not been called for a
    while. Both come whole and in order."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]], seconds: float | None = None) -> None:
        self._send = send
        self._seconds = KEEP_ALIVE_SECONDS if seconds is None else seconds
        self._writing = False

    async def __aenter__(self) -> KeepAlive:
        self._last = asyncio.get_running_loop().time()
        self._commenting = asyncio.create_task(self._comment())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commenting.cancel()
        # Also when this task itself is cancelled; and what a comment may have met, such as a client that has left, the
        # next event meets too.
        await asyncio.gather(self._commenting, return_exceptions=True)

    async def write(self, events: bytes) -> None:
        self._writing = True
        try:
            await self._send(events)
        finally:
            self._writing = False
            self._last = asyncio.get_running_loop().time()

    async def _comment(self) -> None:
        while True:
            rest = self._last + self._seconds - asyncio.get_running_loop().time()
            if rest > 0 or self._writing:  # a client that is slow to read hears enough
                await asyncio.sleep(max(rest, 0.0) or self._seconds)
            else:
                await self.write(COMMENT)
