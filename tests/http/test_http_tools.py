"""Tools over HTTP: what an answer with calls looks like, and an agent's turns on the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine_actor.options import GrammarKind
from serve_app.text.calls import OPENING, written_call
from serve_app.text.prompts import PromptBuilder
from tests.http.http_harness import CHAT, MODEL, Server, error_of, events
from tests.http.real_door import real_door

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "In a city", "parameters": CITY},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, NOW]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARIS = written_call("weather", {"city": "Paris"})


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_calls_are_told_from_text_whole_and_streamed(server: Server, client: openai.OpenAI) -> None:
    server.say(f"Let me see.\n{PARIS}\n{written_call('now', {})}")
    whole = client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS).choices[0]
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        calls = choice.message.tool_calls or []
        assert [(c.type, c.function.name, c.function.arguments) for c in calls if c.type == "function"] == [
            ("function", "weather", '{"city": "Paris"}'),
            ("function", "now", "{}"),
        ]
        assert len({c.id for c in calls}) == 2


def test_an_answer_of_calls_alone_has_no_content(server: Server) -> None:
    server.say(PARIS)
    answer = server.chat(tools=TOOLS).json()["choices"][0]
    assert answer["message"]["content"] is None
    deltas = [e["choices"][0]["delta"] for e in events(server.chat(tools=TOOLS, stream=True)) if e != "[DONE]"]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("content" not in delta for delta in deltas[1:])
    first = deltas[1]["tool_calls"][0]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    rest = [call for delta in deltas[2:] for call in delta.get("tool_calls", ())]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)


def test_without_a_call_an_answer_is_as_ever(server: Server) -> None:
    plain, given = server.chat().json()["choices"], server.chat(tools=TOOLS).json()["choices"]
    assert plain == given
    assert given[0]["finish_reason"] == "stop"


def test_a_call_that_a_limit_cuts_is_shown_as_far_as_it_came(server: Server) -> None:
    server.say(PARIS)
    length = len(server.prompts.tokenizer.encode(PARIS[:-20], special_tokens=False))
    answer = server.chat(tools=TOOLS, max_tokens=length).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])


def test_text_that_looks_like_a_call_is_text_where_no_tool_may_be_called(server: Server) -> None:
    server.say(PARIS)
    toolless: list[dict[str, Any]] = [
        {}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"},
    ]  # fmt: skip
    for fields in toolless:
        answer = server.chat(**fields).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (PARIS, "stop")
        assert server.engine.requests[-1].grammar is None


@pytest.mark.parametrize("text", ["a <END", "a \nEND", "a END", "<tool_callEND", "x <tool_call>\n{END", "END"])
def test_tools_do_not_change_what_stands_before_a_stop_string(server: Server, text: str) -> None:
    server.say(text)
    plain = server.chat(stop="END").json()["choices"]
    assert plain[0]["message"]["content"] == text.removesuffix("END")
    assert server.chat(stop="END", tools=TOOLS).json()["choices"] == plain
    streamed = events(server.chat(stop="END", tools=TOOLS, stream=True))
    deltas = [e["choices"][0]["delta"] for e in streamed if e != "[DONE]"]
    assert "".join(delta.get("content", "") for delta in deltas) == text.removesuffix("END")


@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [
        ("Par", '{"city": "', "stop"),
        ("is", '{"city": "Par', "stop"),
        ("\n</tool_call>", '{"city": "Paris"}', "tool_calls"),
        ("</tool_call>", '{"city": "Paris"}', "tool_calls"),
    ],
)
def test_a_call_that_a_stop_string_cuts_is_none_to_make(server: Server, stop: str, arguments: str, reason: str) -> None:
    """It is shown as far as it came. One that lacks no more than its closing is whole."""
    server.say(PARIS)
    begun = server.chat(tools=TOOLS, stop=stop).json()["choices"][0]
    (call,) = begun["message"]["tool_calls"]
    assert (call["function"]["arguments"], begun["finish_reason"]) == (arguments, reason)


@pytest.mark.parametrize(
    ("fields", "trigger"),
    [
        ({}, OPENING),
        ({"tool_choice": "auto"}, OPENING),
        ({"tool_choice": "required"}, ""),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ""),
    ],
)
def test_the_engine_gets_a_grammar_of_the_calls(server: Server, fields: dict[str, Any], trigger: str) -> None:
    server.say(written_call("now", {}))
    assert server.chat(tools=TOOLS, **fields).status_code == 200
    spec = server.engine.requests[-1].grammar
    assert spec is not None
    assert (spec.kind, spec.trigger) == (GrammarKind.LARK, trigger)
    assert ("weather" in spec.data) == (not isinstance(fields.get("tool_choice"), dict))


def test_tools_are_in_the_prompt_the_same_whatever_may_be_called(server: Server) -> None:
    choices: list[Any] = ["auto", "none", "required", {"type": "function", "function": {"name": "now"}}]
    for choice in choices:
        server.chat(tools=TOOLS, tool_choice=choice)
    prompts = {turn.prompt_ids for turn in server.engine.requests}
    assert len(prompts) == 1
    assert '"description": "In a city"' in server.prompts.tokenizer.decode(prompts.pop(), control_tokens=True)


def test_a_schema_with_words_that_cannot_be_kept_to(server: Server) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "sonnet"}}}
    lenient = {"type": "function", "function": {"name": "f", "parameters": odd}}
    assert server.chat(tools=[lenient]).status_code == 200
    strict = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}
    error = error_of(server.chat(tools=[NOW, strict]))
    assert (error["param"], error["code"]) == ("tools.1.function.parameters", "invalid_grammar")
    assert "sonnet" in error["message"]


def test_beside_a_form_of_the_text_an_answer_is_that_or_calls(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": {"a": {"type": "string"}}}}}
    text = json.dumps({"a": PARIS})
    server.say(text)
    answer = server.chat(tools=TOOLS, response_format=form).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")
    spec = server.engine.requests[-1].grammar
    assert spec is not None and spec.trigger == "" and '"a"' in spec.data
    server.say(PARIS)
    answer = server.chat(tools=TOOLS, response_format=form).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    server.chat(tools=TOOLS, response_format=form, tool_choice="required")
    spec = server.engine.requests[-1].grammar
    assert spec is not None and '"a"' not in spec.data


# -- the real model ---------------------------------------------------------------------------------------------------


async def _ask(http: httpx.AsyncClient, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 100, "temperature": 0, "tools": TOOLS, **fields}
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def _assert_fits(call: dict[str, Any], names: set[str]) -> None:
    function = call["function"]
    assert function["name"] in names
    arguments = json.loads(function["arguments"])
    if function["name"] == "now":
        assert arguments == {}
    else:
        assert set(arguments) <= {"city", "unit"} and isinstance(arguments["city"], str)
        assert len(arguments["city"]) <= 20 and arguments.get("unit", "C") in ("C", "F")


async def test_whatever_the_model_calls_fits_its_tools(smollm2_path: Path, prompts: PromptBuilder) -> None:
    async with real_door(smollm2_path, prompts) as http:
        hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": 7, "n": 4}
        several = await _ask(http, ASKED, tool_choice="required", **hot)
        one = await _ask(http, ASKED, tool_choice="required", parallel_tool_calls=False, **hot)
        chosen = {"type": "function", "function": {"name": "weather"}}
        named = await _ask(http, ASKED, tool_choice=chosen, **hot)
        for answer, most, names in (
            (several, 100, {"weather", "now"}),
            (one, 1, {"weather", "now"}),
            (named, 1, {"weather"}),
        ):
            for choice in answer["choices"]:
                if choice["finish_reason"] == "length":
                    continue
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] is None
                assert 1 <= len(choice["message"]["tool_calls"]) <= most
                for call in choice["message"]["tool_calls"]:
                    _assert_fits(call, names)


async def test_an_answer_in_json_or_in_calls(smollm2_path: Path, prompts: PromptBuilder) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {
        "rain": {"type": "boolean"}}, "required": ["rain"], "additionalProperties": False}}}  # fmt: skip
    async with real_door(smollm2_path, prompts) as http:
        hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": 3, "n": 8}
        answer = await _ask(http, ASKED, response_format=form, **hot)
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                assert set(json.loads(choice["message"]["content"])) == {"rain"}
            elif choice["finish_reason"] == "tool_calls":
                for call in choice["message"]["tool_calls"]:
                    _assert_fits(call, {"weather", "now"})
        assert "stop" in {choice["finish_reason"] for choice in answer["choices"]}


async def test_an_agents_turn_computes_only_what_is_new(smollm2_path: Path, prompts: PromptBuilder) -> None:
    async with real_door(smollm2_path, prompts) as http:
        messages: list[Any] = list(ASKED)
        known = 0
        for turn in range(4):
            asked = await _ask(http, messages, session_id="agent", tool_choice="required", parallel_tool_calls=False)
            usage = asked["usage"]
            if turn:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= known - 1, "the calls that came back were computed again"
            known = usage["total_tokens"]
            message = asked["choices"][0]["message"]
            messages.append(message)
            for call in message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{20 + turn} C, rain"})
        said = await _ask(http, messages, session_id="agent", tool_choice="none")
        assert said["choices"][0]["message"]["content"]
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 1


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        *[(nothing, "{}") for nothing in (None, "", " \n", "null", "{}")],
        *[(text, text) for text in ("5", '"x"', "[1, 2]", '{"city": "Par', '{"a": NaN}', '{"a": "\\ud800"}')],
    ],
)
def test_a_conversation_goes_on_whatever_the_arguments_of_a_past_call_are(
    server: Server, arguments: str | None, written: str
) -> None:
    """A model wrote them so, or a limit cut them: both APIs give the same prompt."""
    call = {"name": "weather", "arguments": arguments}
    past = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    chat = server.post(CHAT, {"model": MODEL, "messages": [*ASKED, past, result], "tools": TOOLS})
    items = [*ASKED, {"type": "function_call", "call_id": "1", **call}]
    output = {"type": "function_call_output", "call_id": "1", "output": "rain"}
    flat = [{"type": "function"} | tool["function"] for tool in TOOLS]
    responses = server.respond([*items, output], tools=flat)
    assert (chat.status_code, responses.status_code) == (200, 200)
    prompts = [server.prompts.tokenizer.decode(request.prompt_ids) for request in server.engine.requests[-2:]]
    assert prompts[0] == prompts[1] and f'"arguments": {written}}}\n</tool_call>' in prompts[0]


def test_no_tool_to_call_needs_no_grammar(server: Server) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": -1}}}
    assert server.chat(tools=[bad], tool_choice="none").status_code == 200
    assert server.engine.requests[-1].grammar is None
