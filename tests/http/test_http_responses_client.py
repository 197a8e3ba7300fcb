"""The Responses API by the openai client, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.http.flat_tools import PARIS, TIME, TOOLS, output_of
from tests.http.http_harness import MODEL, Server, wait_until


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_create_streamed_and_whole(server: Server, client: openai.OpenAI) -> None:
    server.say("It is Paris 😀.")
    whole = client.responses.create(
        model=MODEL, input="Capital of France?", instructions="Be brief.", temperature=0, metadata={"a": "b"}
    )
    assert (whole.output_text, whole.status, whole.metadata) == ("It is Paris 😀.", "completed", {"a": "b"})
    assert whole.usage is not None and whole.usage.input_tokens_details.cached_tokens == 3
    stream = client.responses.create(model=MODEL, input="Capital of France?", instructions="Be brief.", stream=True)
    text, last = "", None
    for number, event in enumerate(stream):
        assert event.sequence_number == number
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert text == whole.output_text
    assert last is not None and last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_streaming_helper_accumulates_the_same_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == ("Hello there!", "completed")


class City(pydantic.BaseModel):
    name: str


def test_responses_are_parsed_into_the_callers_model(server: Server, client: openai.OpenAI) -> None:
    server.say('{"name": "Paris"}')
    whole = client.responses.parse(model=MODEL, input="Capital of France?", text_format=City)
    assert whole.output_parsed == City(name="Paris")
    assert whole.text is not None and whole.text.format is not None and whole.text.format.type == "json_schema"
    with client.responses.stream(model=MODEL, input="Capital of France?", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Paris")


def test_a_conversation_by_id(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="one")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    assert second.previous_response_id == first.id
    assert {request.session_id for request in server.engine.requests} == {first.id}
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as done:
        client.responses.cancel(second.id)
    assert done.value.code == "response_not_in_progress"


def test_parts_and_output_items_as_input(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, store=False, input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    )
    history: list[Any] = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "More"}]
    assert client.responses.create(model=MODEL, store=False, input=history).output_text == "Hello there!"
    assert len(server.engine.requests[1].spans) == 1


def test_items_that_the_server_keeps_are_referred_to_by_their_ids(server: Server, client: openai.OpenAI) -> None:
    server.say(f"Let me see.\n{PARIS}\n{TIME}")
    asked: Any = {"role": "user", "content": "Weather?"}
    first = client.responses.create(model=MODEL, input=[asked], tools=TOOLS, store=True, instructions="Be kind.")
    outputs: list[Any] = [output_of(item.to_dict(), "rain") for item in first.output if item.type == "function_call"]
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    untyped: list[Any] = [{"id": item.id} for item in first.output]
    server.say("It rains.")
    for items in (first.output, references, untyped):
        again = client.responses.create(
            model=MODEL, input=[asked, *items, *outputs], tools=TOOLS, instructions="Be kind."
        )
        assert again.output_text == "It rains."
    by_items, by_ids, by_bare_ids = server.engine.requests[-3:]
    assert by_items.prompt_ids == by_ids.prompt_ids == by_bare_ids.prompt_ids
    assert by_items.spans == by_ids.spans and len(by_ids.spans) == 1
    assert by_ids.session_id == first.id != by_items.session_id
    with pytest.raises(openai.BadRequestError) as unanswered:
        client.responses.create(model=MODEL, input=[asked, *references])
    assert unanswered.value.param == "input"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model=MODEL, input=[asked, *references])
    assert (gone.value.param, gone.value.code) == ("input.1.id", "item_not_found")


def test_what_was_parsed_comes_back_as_it_is(server: Server, client: openai.OpenAI) -> None:
    server.say('{"name": "Paris"}')
    first = client.responses.parse(model=MODEL, input="Capital of France?", text_format=City)
    again: list[Any] = [*first.output, {"role": "user", "content": "Why?"}]
    client.responses.parse(model=MODEL, input=again, text_format=City)
    assert len(server.engine.requests[-1].spans) == 1


def test_models_and_unknown_ones(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


async def test_async_create_stream_retrieve_delete(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.responses.create(model=MODEL, input="Hi")
        stream = await client.responses.create(model=MODEL, input="Again", previous_response_id=whole.id, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == whole.output_text == "Hello there!"
        kept = await client.responses.retrieve(events[-1].response.id)
        assert kept.output_text == "Hello there!"
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)


async def test_async_cancel_ends_the_stream(server: Server) -> None:
    server.say("one two three four")
    server.engine.hold_at = 2
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        created = await anext(stream)
        assert created.type == "response.created"
        await asyncio.to_thread(wait_until, lambda: server.engine.tokens_sent == 1)
        assert (await client.responses.cancel(created.response.id)).status == "cancelled"
        events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        assert (events[-1].response.status, events[-1].response.output_text) == ("cancelled", "one")
        assert (await client.responses.retrieve(created.response.id)).output_text == "one"


def test_max_output_tokens_ends_as_incomplete(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=1) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"


def test_unserved_fields_raise_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi", background=True)
    assert refused.value.param == "background"
