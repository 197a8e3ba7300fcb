"""The openai client, as its users call it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine_actor.messages import RefusalCode, TurnRefused
from tests.http.http_harness import MODEL, Server, StartServer

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_streamed_and_whole(server: Server, client: openai.OpenAI) -> None:
    server.say("It is Paris 😀.")
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert whole.choices[0].message.content == "It is Paris 😀."
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is Paris 😀."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


def test_the_streaming_helper_accumulates_the_same_answer(server: Server, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there!"
    assert final.choices[0].finish_reason == "stop"


class City(pydantic.BaseModel):
    name: str
    capital: bool


def test_answers_are_parsed_into_the_callers_model(server: Server, client: openai.OpenAI) -> None:
    server.say('{"name": "Paris 😀", "capital": true}')
    whole = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
    assert whole.choices[0].message.parsed == City(name="Paris 😀", capital=True)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed
    for request in server.engine.requests:
        assert request.grammar is not None and list(json.loads(request.grammar.data)["properties"]) == [
            "name",
            "capital",
        ]


def test_completions_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=2)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello there", "length")
    chunks = list(client.completions.create(model=MODEL, prompt="Once", max_tokens=2, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello there"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_async_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == whole.choices[0].message.content == "Hello there!"
        completion = await client.completions.create(model=MODEL, prompt="Once")
        assert completion.choices[0].text == "Hello there!"
        assert [model.id async for model in client.models.list()] == ["smollm2", "alias"]


def test_sessions_and_response_headers(server: Server, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, extra_headers={"x-session-id": "a"}, extra_body={"top_k": 3}
    )
    assert raw.headers["x-moorage-replica"] == "replica-1"
    assert raw.headers["x-request-id"] == server.engine.requests[0].request_id
    assert server.engine.requests[0].session_id == "a"
    assert server.engine.requests[0].sampling.top_k == 3


def test_errors_are_the_clients_own_types(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    server.engine.refusal = TurnRefused(RefusalCode.QUEUE_FULL, "full")
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    server.engine.refusal = TurnRefused(RefusalCode.UNAVAILABLE, "draining")
    with pytest.raises(openai.InternalServerError) as down:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert down.value.status_code == 503


def test_an_error_in_mid_stream_is_raised(server: Server, client: openai.OpenAI) -> None:
    server.engine.failed = "the engine stopped"
    with pytest.raises(openai.APIError, match="the engine stopped"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_keys(start_server: StartServer) -> None:
    server = start_server(api_keys=("secret",))
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
        assert client.models.list().data[0].id == MODEL
