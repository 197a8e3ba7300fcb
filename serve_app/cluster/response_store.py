"""The `ResponseStore` of an application: one process holds the responses, every ingress asks it.

    Ingress, Ingress, ...  -> handle ->  MemoryResponseStore (a deployment with one replica)

What crosses is plain data. The store lives as long as the application; if its process dies, Serve starts an empty one
and chains that were kept in it give a 404 that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from serve_app.ingress.errors import ApiError, retry_later
from serve_app.openai.responses.store import FoundItems, History, StoredResponse

logger = logging.getLogger("moorage")

_LOST = (RayActorError, BackPressureError, DeploymentUnavailableError, TimeoutError)
_RETRY_AFTER_SECONDS = 1.0
LEASE_SECONDS = 30.0  # how long a response stays in progress whose ingress has died: twice this at most


class HandleResponseStore:
    """Implements `ResponseStore`. Raises ApiError 503 where the store can't be reached."""

    def __init__(self, handle: DeploymentHandle, *, timeout: float) -> None:
        """`timeout`: seconds that a call waits for the store's process to exist and to answer."""
        self._handle = handle
        self._holding = handle.options(stream=True, method_name="hold")
        self._timeout = timeout

    async def hold(self, running: StoredResponse, cancelled: str) -> AsyncGenerator[bool, None]:
        announced = False
        while True:
            response = self._holding.remote(running, cancelled)
            ended = False
            try:
                try:
                    async with asyncio.timeout(self._timeout):
                        await anext(response)
                except _LOST as error:
                    raise _unavailable(error) from error
                if not announced:
                    announced = True
                    yield False
                async for _ in response:
                    yield True
                    return
                ended = True  # its lease is over: once more
            finally:
                if not ended:
                    with contextlib.suppress(Exception):  # of a call that nobody could take, it raises why once more
                        response.cancel()

    async def put(self, stored: StoredResponse) -> None:
        await self._call("put", stored)

    async def get(self, tenant: str, response_id: str) -> str | None:
        shown: str | None = await self._call("get", tenant, response_id)
        return shown

    async def history(self, tenant: str, response_id: str, most_bytes: int) -> History | None:
        history: History | None = await self._call("history", tenant, response_id, most_bytes)
        return history

    async def items(self, tenant: str, item_ids: Sequence[str], most_bytes: int) -> FoundItems:
        items: FoundItems = await self._call("items", tenant, item_ids, most_bytes)
        return items

    async def lost(self, tenant: str, some_id: str) -> bool:
        return bool(await self._call("lost", tenant, some_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await self._call("delete", tenant, response_id))

    async def cancel(self, tenant: str, response_id: str) -> str | None:
        shown: str | None = await self._call("cancel", tenant, response_id)
        return shown

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._handle.options(method_name=method).remote(*args)
        except _LOST as error:
            raise _unavailable(error) from error


def _unavailable(error: Exception) -> ApiError:
    logger.warning("the store of responses can't be reached: %s", type(error).__name__)
    return retry_later(503, "Stored responses can't be reached at the moment.", "unavailable", _RETRY_AFTER_SECONDS)
