"""Function tools in /v1/responses: what items and events look like, alone and by the client of OpenAI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseFunctionToolCall

from engine_actor.options import GrammarKind
from serve_app.text.calls import OPENING
from tests.http.flat_tools import CHAT_TOOLS, NOW, PARIS, QUESTION, TIME, TOOLS, WEATHER, Item, output_of
from tests.http.http_harness import MODEL, RESPONSES, Server, error_of, named_events


def without_ids(items: list[Item]) -> list[Item]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def call_item(name: str, arguments: str, status: str = "completed") -> Item:
    return {"type": "function_call", "status": status, "name": name, "arguments": arguments}


def message_item(text: str, status: str = "completed") -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


def test_a_call_is_an_item_of_its_own_whole_and_streamed(server: Server) -> None:
    server.say(f"Let me see.\n{PARIS}\n{TIME}")
    whole = server.respond(QUESTION, tools=TOOLS).json()
    events = named_events(server.respond(QUESTION, tools=TOOLS, stream=True))
    streamed = events[-1]["response"]
    expected = [message_item("Let me see."), call_item("weather", '{"city": "Paris"}'), call_item("now", "{}")]
    for response in (whole, streamed):
        assert response["status"] == "completed"
        assert without_ids(response["output"]) == expected
        calls = response["output"][1:]
        assert all(re.fullmatch(r"fc_[0-9a-f]{24}", call["id"]) for call in calls)
        assert all(re.fullmatch(r"call_[0-9a-f]{24}", call["call_id"]) for call in calls)
        assert len({call["id"] for call in calls} | {call["call_id"] for call in calls}) == 4
        assert server.client.get(f"{RESPONSES}/{response['id']}").json() == response


CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
MESSAGE_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
OPENED = ["response.created", "response.in_progress"]


@pytest.mark.parametrize("chunks", [[1], [3], [1000]], ids=["token by token", "in threes", "at once"])
@pytest.mark.parametrize("text", ["", "Let me see."])
def test_items_are_told_one_after_the_other(server: Server, text: str, chunks: list[int]) -> None:
    server.engine.chunks = chunks
    server.say("\n".join(part for part in (text, PARIS, TIME) if part))
    events = named_events(server.respond(QUESTION, tools=TOOLS, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    deltas_once = [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]
    message = MESSAGE_EVENTS if text else []
    assert deltas_once == [*OPENED, *message, *CALL_EVENTS, *CALL_EVENTS, "response.completed"]
    done = events[-1]["response"]["output"]
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        assert [event["item_id"] for event in own if "item_id" in event] == [item["id"]] * (len(own) - 2)
        added, last = own[0]["item"], own[-1]["item"]
        assert (added["id"], added["status"], last) == (item["id"], "in_progress", item)
        if item["type"] == "function_call":
            assert added == item | {"status": "in_progress", "arguments": ""}
            assert "".join(event.get("delta", "") for event in own) == own[-2]["arguments"] == item["arguments"]


def test_without_a_call_a_response_is_as_ever(server: Server) -> None:
    plain, given = server.respond().json(), server.respond(tools=TOOLS).json()
    assert without_ids(plain["output"]) == without_ids(given["output"]) == [message_item("Hello there!")]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_an_answer_of_nothing_is_an_empty_message(server: Server, tools: Any) -> None:
    server.say("")
    whole = server.respond(tools=tools).json()
    events = named_events(server.respond(tools=tools, stream=True))
    assert without_ids(whole["output"]) == without_ids(events[-1]["response"]["output"]) == [message_item("")]
    kinds = [*OPENED, *MESSAGE_EVENTS, "response.completed"]
    kinds.remove("response.output_text.delta")
    assert [event["type"] for event in events] == kinds


def test_tools_are_said_again(server: Server) -> None:
    chosen = {"type": "function", "name": "now"}
    server.say(TIME)
    said = server.respond(tools=[WEATHER, NOW | {"strict": True}], tool_choice=chosen, parallel_tool_calls=False).json()
    assert said["tools"] == [
        WEATHER | {"strict": None},
        {"type": "function", "name": "now", "description": None, "parameters": None, "strict": True},
    ]
    assert (said["tool_choice"], said["parallel_tool_calls"]) == (chosen, False)
    assert server.respond(tools=TOOLS, tool_choice="required").json()["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (None, {}),
        ("none", {}),
        ("required", {"parallel_tool_calls": False}),
        ({"type": "function", "name": "now"}, {}),
    ],
)
def test_prompt_and_grammar_are_those_of_chat(server: Server, choice: Any, fields: dict[str, Any]) -> None:
    server.say(TIME)
    in_chat = {"type": "function", "function": {"name": "now"}} if isinstance(choice, dict) else choice
    assert server.respond(QUESTION, tools=TOOLS, tool_choice=choice, **fields).status_code == 200
    assert server.chat(QUESTION, tools=CHAT_TOOLS, tool_choice=in_chat, **fields).status_code == 200
    response, chat = server.engine.requests
    assert response.prompt_ids == chat.prompt_ids
    assert response.grammar == chat.grammar
    if choice is None:
        assert response.grammar is not None
        assert (response.grammar.kind, response.grammar.trigger) == (GrammarKind.LARK, OPENING)


def test_beside_a_format_an_answer_is_that_or_calls(server: Server) -> None:
    text = {"format": {"type": "json_object"}}
    assert server.respond(tools=TOOLS, text=text).status_code == 200
    spec = server.engine.requests[-1].grammar
    assert spec is not None and (spec.kind, spec.trigger) == (GrammarKind.LARK, "")
    assert server.respond(tools=TOOLS, tool_choice="none", text=text).status_code == 200
    spec = server.engine.requests[-1].grammar
    assert spec is not None and spec.kind is GrammarKind.JSON_SCHEMA


def test_a_schema_with_words_that_cannot_be_kept_to(server: Server) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "sonnet"}}}
    assert server.respond(tools=[{"type": "function", "name": "f", "parameters": odd}]).status_code == 200
    strict = {"type": "function", "name": "f", "parameters": odd, "strict": True}
    error = error_of(server.respond(tools=[NOW, strict]))
    assert (error["param"], error["code"]) == ("tools.1.parameters", "invalid_grammar")


# -- the client of OpenAI ---------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


class weather(pydantic.BaseModel):  # the client makes the function's name of it
    """In a city"""

    city: str


def test_the_client_parses_calls_whole_and_streamed(server: Server, client: openai.OpenAI) -> None:
    server.say(f"Let me see.\n{PARIS}")
    # Older clients make it flat by themselves.
    tool_of = getattr(openai, "pydantic_responses_function_tool", openai.pydantic_function_tool)
    tools = [tool_of(weather)]
    parsed = client.responses.parse(model=MODEL, input=QUESTION, tools=tools)
    with client.responses.stream(model=MODEL, input=QUESTION, tools=tools) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 1
    for response in (parsed, streamed):
        assert response.output_text == "Let me see."
        call = response.output[1]
        assert isinstance(call, ResponseFunctionToolCall)
        assert call.parsed_arguments == weather(city="Paris")


def test_the_clients_loop_with_its_own_items(server: Server, client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    server.say(f"{PARIS}\n{TIME}")
    asked = client.responses.create(model=MODEL, input=items, tools=TOOLS, store=False)
    items += asked.output
    items += [output_of({"call_id": item.call_id}, "rain") for item in asked.output if item.type == "function_call"]
    server.say("It rains.")
    assert client.responses.create(model=MODEL, input=items, tools=TOOLS, store=False).output_text == "It rains."
    assert server.prompts.tokenizer.decode(server.engine.requests[-1].prompt_ids).count("rain") == 2
