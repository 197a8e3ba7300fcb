"""Chat and responses follow one rule, each in its own spelling: what changes nothing is accepted, what would give an
answer that was not asked for is refused by its field, and the same conversation makes the same prompt."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.text.prompts import PromptBuilder
from tests.http.http_harness import CHAT, MODEL, Server, StartServer, error_of
from tests.support.tokenizers import with_template

Fields = dict[str, Any]
HINTS: Fields = {
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "stream_options": None,
    "moderation": None,
    "store": False,
}
ACCEPTED: list[tuple[Fields, Fields]] = [
    (HINTS, HINTS),
    ({"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}),
    ({"reasoning_effort": None}, {"reasoning": {"effort": None, "summary": None, "generate_summary": None}}),
    ({"verbosity": "medium"}, {"text": {"verbosity": "medium"}}),
    ({"verbosity": None}, {"text": {"verbosity": None, "format": None}}),
    ({"modalities": ["text"], "audio": None, "web_search_options": None, "functions": None}, {"prompt": None}),
    ({"prediction": {"type": "content", "content": "x"}}, {"prompt_cache_options": {"mode": "implicit"}}),
]
REFUSED: list[tuple[Fields, str, Fields, str]] = [
    *[({"reasoning_effort": v}, "reasoning_effort", {"reasoning": {"effort": v}}, "reasoning.effort")
      for v in ("minimal", "low", "medium", "high", "", 5, ["none"])],
    *[({"verbosity": v}, "verbosity", {"text": {"verbosity": v}}, "text.verbosity") for v in ("low", "high", 5)],
    *[({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation") * 2],
    ({"moderation": {"model": "m"}}, "moderation") * 2,
    ({"chat_template": "x"}, "chat_template") * 2,
    ({"audio": {"voice": "v"}}, "audio", {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
]  # fmt: skip


@pytest.mark.parametrize(("chat", "response"), ACCEPTED)
def test_what_changes_nothing_is_accepted(server: Server, chat: Fields, response: Fields) -> None:
    for answer in (server.chat(**chat), server.respond(**response), server.chat(), server.respond()):
        assert answer.status_code == 200, answer.text
    assert len({request.prompt_ids for request in server.engine.requests}) == 1


@pytest.mark.parametrize(("chat", "chat_param", "response", "response_param"), REFUSED)
def test_what_would_be_lost_is_refused_by_its_field(
    server: Server, chat: Fields, chat_param: str, response: Fields, response_param: str
) -> None:
    for answer, param in ((server.chat(**chat), chat_param), (server.respond(**response), response_param)):
        error = error_of(answer)
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert error["message"].startswith(f"`{param}` is not supported by this server: remove it")
    assert server.engine.requests == []


def test_a_type_of_tool_that_is_not_served_is_said_with_the_one_that_is(server: Server) -> None:
    tools = [{"type": "web_search"}]
    for answer in (server.chat(tools=tools), server.respond(tools=tools)):
        assert error_of(answer)["message"] == (
            "tools.0.type: a tool of type \"web_search\" is not supported by this server: the only type is 'function'"
        )


def test_thoughts_that_no_request_can_turn_off_are_not_said_to_be_off(
    start_server: StartServer, server: Server
) -> None:
    plain = server.prompts.tokenizer
    source = f"{plain.template}{{% if enable_thinking is defined %}}<think></think>{{% endif %}}"
    thinking = start_server(prompts=PromptBuilder(with_template(plain, source)))
    assert error_of(thinking.chat(reasoning_effort="none"))["param"] == "reasoning_effort"
    assert error_of(thinking.respond(reasoning={"effort": "none"}))["param"] == "reasoning.effort"
    assert thinking.chat().status_code == thinking.respond(reasoning={"effort": None}).status_code == 200


PART = {"text": "Hello."}
ASSISTANTS: list[Fields] = [
    {"content": "Hello."},
    *[{"content": [PART | {"type": kind}]} for kind in ("text", "input_text", "output_text")],
    {"content": [{"type": "refusal", "refusal": "Hello."}]},
    {"content": [PART | {"type": "output_text", "annotations": [], "logprobs": []}],
     "id": "msg_1", "status": "completed", "phase": "final_answer"},
]  # fmt: skip


def test_a_text_is_the_same_in_whatever_parts_it_comes(server: Server) -> None:
    for said in ASSISTANTS:
        for kind in ("text", "input_text", "output_text"):
            user = {"role": "user", "content": [{"type": kind, "text": "Hi"}]}
            messages = [user, {"role": "assistant", **said}, user | {"name": "ann"}]
            assert server.post(CHAT, {"model": MODEL, "messages": messages}).status_code == 200
            assert server.respond(messages, store=False).status_code == 200
    assert len({request.prompt_ids for request in server.engine.requests}) == 1
    assert {len(request.spans) for request in server.engine.requests} == {1}


def test_what_an_assistant_refused_with_is_what_it_said(server: Server) -> None:
    hi = {"role": "user", "content": "Hi"}
    refusals: list[dict[str, Any]] = [
        {"content": None, "refusal": "No."},
        {"content": "", "refusal": "No.", "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"content": "No.", "refusal": None, "reasoning_content": "Hm."},
        {"content": [{"type": "refusal", "refusal": "No."}], "refusal": ""},
    ]
    for refusal in refusals:
        assert server.post(CHAT, {"messages": [hi, {"role": "assistant", **refusal}, hi]}).status_code == 200
    assert len({request.prompt_ids for request in server.engine.requests}) == 1


def test_reasoning_that_comes_back_is_passed_over(server: Server) -> None:
    call, output = (
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    )
    other, its_output = call | {"call_id": "d"}, output | {"call_id": "d"}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Hm."}],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "encrypted_content": "gAAA",
        "status": "completed",
    }
    hi = {"type": None, "role": "user", "content": "Hi"}
    assert server.respond([hi, thought, call, thought, other, output, thought, its_output]).status_code == 200
    assert server.respond([hi, call, other, output, its_output]).status_code == 200
    with_thoughts, without = server.engine.requests
    assert (with_thoughts.prompt_ids, with_thoughts.spans) == (without.prompt_ids, without.spans)
    refused = server.respond([hi, thought, thought, output])
    assert error_of(refused)["param"] == "input.3.call_id"


def test_a_prompt_that_truncation_would_have_to_shorten_is_refused_by_it(server: Server) -> None:
    for words in (600, 200_000):
        error = error_of(server.respond("word " * words, truncation="auto"))
        assert (error["param"], error["code"]) == ("truncation", "context_length_exceeded")
        assert "drops nothing" in error["message"]
        assert error_of(server.respond("word " * words))["param"] == "input"


def test_what_was_asked_is_said_again(server: Server) -> None:
    asked: Fields = {
        "reasoning": {"effort": "none", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "auto",
        "max_tool_calls": 3,
    }
    whole = server.respond(**asked).json()
    assert {name: whole[name] for name in asked} == asked
