"""A wait that somebody else can end, and a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The wait was ended from elsewhere."""


class Interruption:
    """A context manager around one wait at a time: `interrupt` ends it with Interrupted.

    It does what `asyncio.timeout(None)` and a reschedule do, for a fifth of what they cost, which counts where there is
    a wait for each token. Whoever cancels the task meanwhile still gets it cancelled.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None  # that waits
        self._cancelling = 0  # what had cancelled it before
        self._interrupted = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._interrupted:
            assert task is not None
            self._interrupted = False
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise Interrupted from error

    def interrupt(self) -> None:
        """Does nothing where nobody waits."""
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()


class Cancellation:
    """Ends a stream from elsewhere than its reader."""

    def __init__(self) -> None:
        self.requested = False
        self._wait = Interruption()

    def request(self) -> None:
        self.requested = True
        self._wait.interrupt()

    async def next(self, stream: AsyncIterator[T]) -> T | None:
        """The next item; None at the end, or as soon as the stream is to end."""
        if self.requested:
            return None
        try:
            with self._wait:
                return await anext(stream, None)
        except Interrupted:
            return None
