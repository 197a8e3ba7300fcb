"""The side of an ingress, over a handle that calls a store in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.response_store import HandleResponseStore
from serve_app.ingress.errors import ApiError
from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.openai.responses.store import StoreLimits
from tests.support.response_store import ResponseStoreConformance, held, stored

LEASE = 0.01


class _Stream:
    """As Serve's: closed by `cancel`, which does not wait. `lost`: nobody takes the call, for this reason."""

    def __init__(self, items: AsyncGenerator[bool, None], lost: list[Exception]) -> None:
        self._items = items
        self._lost = lost

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> bool:
        if self._lost:
            raise self._lost[0]
        return await anext(self._items)

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._items.aclose())
        if self._lost:
            raise self._lost[0]


class FakeHandle:
    """What `HandleResponseStore` uses of a handle. `lost`: every call fails with it."""

    def __init__(self, store: MemoryResponseStore, method: str = "", lost: list[Exception] | None = None) -> None:
        self.store, self.method = store, method
        self.lost: list[Exception] = [] if lost is None else lost
        self.holds = 0

    def options(self, *, method_name: str, stream: bool = False) -> FakeHandle:
        self.holding = FakeHandle(self.store, method_name, self.lost)
        return self.holding

    def remote(self, *args: Any) -> Any:
        self.holds += self.method == "hold"
        result = getattr(self.store, self.method)(*args)
        return _Stream(result, self.lost) if self.method == "hold" else self._call(result)

    async def _call(self, result: Any) -> Any:
        answer = await result
        if self.lost:
            raise self.lost[0]
        return answer


@pytest.fixture
def handle() -> FakeHandle:
    return FakeHandle(MemoryResponseStore(StoreLimits(), LEASE, clock=lambda: 0.0))


@pytest.fixture
def store(handle: FakeHandle) -> HandleResponseStore:
    return HandleResponseStore(cast(DeploymentHandle, handle), timeout=20.0)


class TestHandleStore(ResponseStoreConformance):
    pass


async def test_a_hold_is_renewed_until_it_is_told(handle: FakeHandle, store: HandleResponseStore) -> None:
    holding, running = handle.holding, stored()
    iterator = held(store, running)
    assert await anext(iterator) is False
    waiting = asyncio.ensure_future(anext(iterator))
    while holding.holds < 3:
        await asyncio.sleep(LEASE)
        assert await store.get("o", running.id) == running.shown
    assert await store.cancel("o", running.id) == "{}"
    assert await waiting is True
    await iterator.aclose()


@pytest.mark.parametrize("error", [TimeoutError(), RayActorError()])
async def test_a_store_that_can_not_be_reached_is_a_503(
    handle: FakeHandle, store: HandleResponseStore, error: Exception
) -> None:
    handle.lost.append(error)
    for asking in (store.get("o", "resp_1"), anext(held(store, stored()))):
        with pytest.raises(ApiError) as refused:
            await asking
        assert refused.value.status == 503
        assert refused.value.headers["Retry-After"] == "1"
