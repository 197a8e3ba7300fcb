"""The store of responses behind its handle: the same as in one process, and one for every ingress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import psutil
import pytest
from ray import serve

from serve_app.cluster.app import RESPONSES
from serve_app.cluster.response_store import HandleResponseStore
from serve_app.commands.local_ray import APPLICATION
from serve_app.ingress.errors import ApiError
from tests.cluster.scripted import Deploy, ScriptedEngine
from tests.support.response_store import ResponseStoreConformance

KEY = "key-of-team-a"


@pytest.fixture(scope="module")
def application(deploy: Deploy) -> None:
    deploy(ScriptedEngine, api_keys=(KEY,), ingress_replicas=2, graceful_shutdown_timeout_seconds=2.0)


@pytest.fixture
def store(application: None) -> HandleResponseStore:
    return HandleResponseStore(serve.get_deployment_handle(RESPONSES, APPLICATION), timeout=20.0)


@pytest.fixture
async def http(base_url: str, application: None) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as session:
        yield session


class TestHandleStore(ResponseStoreConformance):
    pass


async def test_a_chain_is_known_to_every_ingress(http: httpx.AsyncClient) -> None:
    previous, homes = None, set()
    for turn in range(6):
        body = {"input": f"turn {turn}", "previous_response_id": previous, "max_output_tokens": 2}
        answer = await http.post("/v1/responses", json=body, headers={"connection": "close"})
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
        homes.add(answer.headers["x-moorage-replica"])
    assert len(homes) == 1
    kept = [await http.get(f"/v1/responses/{previous}", headers={"connection": "close"}) for _ in range(6)]
    assert {answer.status_code for answer in kept} == {200}
    assert (await http.delete(f"/v1/responses/{previous}")).status_code == 200
    assert (await http.get(f"/v1/responses/{previous}")).status_code == 404


async def test_an_item_is_referred_to_from_every_ingress(base_url: str, application: None) -> None:
    for _ in range(4):
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=KEY, max_retries=0) as client:
            asked: Any = {"role": "user", "content": "a"}
            first = await client.responses.create(input=[asked], max_output_tokens=2)
            referred: Any = {"type": "item_reference", "id": first.output[0].id}
            second = await client.responses.create(input=[asked, referred, asked], max_output_tokens=2)
            by_item = await client.responses.create(input=[asked, *first.output, asked], max_output_tokens=2)  # type: ignore[list-item]
            assert second.usage is not None and by_item.usage is not None
            assert second.usage.input_tokens == by_item.usage.input_tokens
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError) as gone:
                await client.responses.create(input=[referred, asked])
            assert gone.value.param == "input.0.id"


async def test_a_response_is_cancelled_from_another_connection(http: httpx.AsyncClient) -> None:
    body = {"input": "a", "stream": True}
    async with http.stream("POST", "/v1/responses", json=body, headers={"x-request-id": "slow-1"}) as answer:
        lines = answer.aiter_lines()
        data = [line async for line in _until(lines, "response.output_text.delta")]
        response_id = next(line for line in data if '"resp_' in line).split('"id":"')[1].split('"')[0]
        cancelled = await http.post(f"/v1/responses/{response_id}/cancel", headers={"connection": "close"})
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        async with asyncio.timeout(30):
            rest = [line async for line in lines]
    assert "event: response.incomplete" in rest
    assert (await http.get(f"/v1/responses/{response_id}")).json()["output"][0]["content"][0]["text"]


async def test_of_what_a_store_has_lost_with_its_process_it_is_said_so(http: httpx.AsyncClient) -> None:
    kept = (await http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2})).json()
    [store] = [p for p in psutil.Process().children(recursive=True) if is_store(p)]
    store.kill()
    async with asyncio.timeout(60):
        while (lost := await http.get(f"/v1/responses/{kept['id']}")).status_code in (200, 503):
            await asyncio.sleep(0.1)
    item = {"type": "item_reference", "id": kept["output"][0]["id"]}
    refused = [
        lost,
        await http.post("/v1/responses", json={"input": "b", "previous_response_id": kept["id"]}),
        await http.post("/v1/responses", json={"input": [item, {"role": "user", "content": "b"}]}),
    ]
    for answer in refused:
        assert answer.status_code == 404
        assert "was made before the store of responses last started" in answer.json()["error"]["message"]
    young = (await http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2})).json()["id"]
    assert (await http.get(f"/v1/responses/{young}")).status_code == 200
    assert (await http.delete(f"/v1/responses/{young}")).status_code == 200
    gone = await http.post("/v1/responses", json={"input": "b", "previous_response_id": young})
    assert "was never stored, was deleted" in gone.json()["error"]["message"]


def is_store(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return f"{APPLICATION}:{RESPONSES}" in " ".join(process.cmdline())
    return False


async def _until(lines: AsyncIterator[str], event: str) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        if line == f"event: {event}":
            return


async def test_a_store_that_is_gone_is_a_503(store: HandleResponseStore) -> None:
    """Comes last in this module: it ends the application."""
    await asyncio.to_thread(serve.delete, APPLICATION)
    with pytest.raises(ApiError) as gone:
        await HandleResponseStore(store._handle, timeout=0.5).get("o", "resp_1")
    assert gone.value.status == 503
    assert gone.value.headers["Retry-After"] == "1"
