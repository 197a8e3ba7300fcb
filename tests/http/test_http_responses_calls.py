"""Conversations with calls in /v1/responses: what is kept of them, and an agent's turns on the real model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from serve_app.text.prompts import PromptBuilder
from tests.http.flat_tools import CHAT_TOOLS, PARIS, QUESTION, TIME, TOOLS, Item, output_of
from tests.http.http_harness import CHAT, RESPONSES, Server, error_of, named_events, wait_until
from tests.http.real_door import real_door


def past_call(name: str = "now", arguments: str = "{}", call_id: str = "c", **fields: Any) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def test_a_chain_has_the_prompt_of_chat_by_id_or_by_items(server: Server) -> None:
    server.say(f"Let me see.\n{PARIS}\n{TIME}")
    first = server.respond(QUESTION, tools=TOOLS, instructions="Be kind.").json()
    message, weather, now = first["output"]
    outputs = [
        output_of(now, "noon"),
        output_of(weather, [{"type": "input_text", "text": t} for t in ("rain", "wind")]),
    ]
    server.say(PARIS)
    second = server.respond(outputs, tools=TOOLS, previous_response_id=first["id"], instructions="Be kind.").json()
    (again,) = second["output"]
    last = [output_of(again, "sun"), {"role": "user", "content": "And now?"}]
    server.respond(last, tools=TOOLS, previous_response_id=second["id"], instructions="Be kind.")

    asked = {"role": "user", "content": QUESTION}
    items = [asked, message, weather, now, *outputs, again, *last]
    assert server.respond(items, tools=TOOLS, store=False, instructions="Be kind.").status_code == 200

    def in_chat(*calls: Item) -> list[Item]:
        named = ("name", "arguments")
        return [
            {"id": call["call_id"], "type": "function", "function": {name: call[name] for name in named}}
            for call in calls
        ]

    messages: list[Item] = [
        {"role": "system", "content": "Be kind."},
        asked,
        {"role": "assistant", "content": "Let me see.", "tool_calls": in_chat(weather, now)},
        {"role": "tool", "tool_call_id": now["call_id"], "content": "noon"},
        {"role": "tool", "tool_call_id": weather["call_id"], "content": "rain\nwind"},
        {"role": "assistant", "content": None, "tool_calls": in_chat(again)},
        {"role": "tool", "tool_call_id": again["call_id"], "content": "sun"},
        {"role": "user", "content": "And now?"},
    ]
    assert server.post(CHAT, {"messages": messages, "tools": CHAT_TOOLS}).status_code == 200
    by_id, by_items, chat = server.engine.requests[-3:]
    assert by_id.prompt_ids == by_items.prompt_ids == chat.prompt_ids
    assert by_id.spans == by_items.spans == chat.spans
    assert len(by_id.spans) == 2


BAD_CALLS: list[tuple[list[Item], str]] = [
    ([output_of({"call_id": "x"}, "noon")], "input.0.call_id"),
    ([output_of({"call_id": "c"}, "noon"), past_call()], "input.0.call_id"),
    ([past_call(), *[output_of({"call_id": "c"}, "noon")] * 2], "input.2.call_id"),
    ([past_call(), past_call(), output_of({"call_id": "c"}, "noon")], "input.1.call_id"),
    ([past_call(), output_of({"call_id": "c"}, "noon"), past_call()], "input.2.call_id"),
    ([past_call()], "input"),
    ([past_call(call_id="d"), past_call(), output_of({"call_id": "c"}, "noon")], "input"),
]


@pytest.mark.parametrize(("items", "param"), BAD_CALLS)
@pytest.mark.parametrize("chained", [True, False])
def test_every_output_answers_a_call_and_every_call_is_answered(
    server: Server, items: list[Item], param: str, chained: bool
) -> None:
    previous = server.respond("Hi").json()["id"] if chained else None
    refused = server.respond([*items, {"role": "user", "content": "Go on"}], previous_response_id=previous)
    assert (refused.status_code, error_of(refused)["param"]) == (400, param)


def test_the_calls_of_a_kept_response_are_answered_once(server: Server) -> None:
    server.say(PARIS)
    first = server.respond(QUESTION, tools=TOOLS).json()
    (call,) = first["output"]
    server.say("It rains.")

    def go_on(*items: Item, previous: Item = first) -> tuple[int, str | None]:
        answer = server.respond(list(items), tools=TOOLS, previous_response_id=previous["id"])
        return answer.status_code, None if answer.status_code == 200 else error_of(answer)["param"]

    hello = {"role": "user", "content": "Hello?"}
    assert go_on(hello) == (400, "input")
    assert go_on(call, output_of(call, "rain")) == (400, "input.0.call_id")
    assert go_on(output_of(call | {"call_id": "other"}, "rain")) == (400, "input.0.call_id")
    assert go_on(hello, output_of(call, "rain")) == (200, None)
    second = server.respond([output_of(call, "sun")], previous_response_id=first["id"]).json()  # a branch
    assert go_on(output_of(call, "rain"), previous=second) == (400, "input.0.call_id")
    assert go_on(hello, previous=second) == (200, None)


def test_a_call_that_a_limit_cuts_is_shown_but_not_gone_on_from(server: Server) -> None:
    said = f"Let me see.\n{TIME}\n{PARIS}"
    server.say(said)
    limit = len(server.prompts.tokenizer.encode(said[:-22], special_tokens=False))
    whole = server.respond(QUESTION, tools=TOOLS, max_output_tokens=limit).json()
    events = named_events(server.respond(QUESTION, tools=TOOLS, max_output_tokens=limit, stream=True))
    streamed = events[-1]["response"]
    for response in (whole, streamed):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        message, now, cut = response["output"]
        assert (message["status"], now["status"], cut["status"]) == ("completed", "completed", "incomplete")
        assert cut["arguments"] and '{"city": "Paris"}'.startswith(cut["arguments"]) and cut["arguments"][-1] != "}"
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"] == cut
    server.say("It is noon.")
    answered = [output_of(now, "noon")]
    assert server.respond(answered, tools=TOOLS, previous_response_id=streamed["id"]).status_code == 200
    asked = {"role": "user", "content": QUESTION}
    assert server.respond([asked, *streamed["output"], *answered], tools=TOOLS, store=False).status_code == 200
    by_id, by_items = server.engine.requests[-2:]
    assert (by_id.prompt_ids, by_id.spans) == (by_items.prompt_ids, by_items.spans)
    refused = server.respond([*answered, output_of(cut, "rain")], previous_response_id=streamed["id"])
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input.1.call_id")


def test_a_cut_call_alone_leaves_an_empty_answer(server: Server) -> None:
    server.say(PARIS)
    limit = len(server.prompts.tokenizer.encode(PARIS[:-22], special_tokens=False))
    first = server.respond(QUESTION, tools=TOOLS, max_output_tokens=limit).json()
    assert [item["type"] for item in first["output"]] == ["function_call"]
    more = {"role": "user", "content": "Well?"}
    assert server.respond([more], tools=TOOLS, previous_response_id=first["id"]).status_code == 200
    asked = {"role": "user", "content": QUESTION}
    assert server.respond([asked, *first["output"], more], tools=TOOLS).status_code == 200
    by_id, by_items = server.engine.requests[-2:]
    assert by_id.prompt_ids == by_items.prompt_ids
    assert server.respond(first["output"]).status_code == 200


def test_a_cancelled_response_keeps_its_calls(server: Server) -> None:
    server.say(f"{TIME}\n{PARIS}")
    server.engine.hold_at = len(server.engine.reply) - 10
    made: list[Any] = []
    asking = threading.Thread(target=lambda: made.append(server.respond(QUESTION, tools=TOOLS).json()))
    asking.start()
    wait_until(lambda: server.engine.hold_at is not None and server.engine.tokens_sent == server.engine.hold_at - 1)
    response_id = server.engine.requests[0].session_id
    assert server.client.post(f"{RESPONSES}/{response_id}/cancel").json()["output"] == []
    asking.join(20)
    now, cut = made[0]["output"]
    assert (made[0]["status"], now["status"], cut["status"]) == ("cancelled", "completed", "incomplete")
    assert cut["name"] == "weather"
    assert server.client.get(f"{RESPONSES}/{response_id}").json() == made[0]
    server.engine.hold_at = None
    assert server.respond([output_of(now, "noon")], previous_response_id=response_id).status_code == 200


def test_a_failed_response_says_what_there_was(server: Server) -> None:
    server.say(f"Let me see.\n{PARIS}")
    server.engine.fail_at = len(server.engine.reply) - 8
    failed = named_events(server.respond(QUESTION, tools=TOOLS, stream=True))[-1]
    assert failed["type"] == "response.failed"
    message, call = failed["response"]["output"]
    assert (message["status"], call["status"]) == ("completed", "incomplete")
    assert call["name"] == "weather"


# -- the real model ---------------------------------------------------------------------------------------------------


async def test_an_agents_turn_by_id_computes_only_what_is_new(smollm2_path: Path, prompts: PromptBuilder) -> None:
    async with real_door(smollm2_path, prompts) as http:

        async def ask(items: Any, previous: str | None, **fields: Any) -> Any:
            body = {"input": items, "previous_response_id": previous, "tools": TOOLS, "temperature": 0}
            answer = await http.post(RESPONSES, json=body | {"max_output_tokens": 100, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()

        items: Any = QUESTION
        known, previous = 0, None
        for turn in range(4):
            several = {"parallel_tool_calls": turn == 2}
            asked = await ask(items, previous, tool_choice="required", **several)
            usage = asked["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] >= known - 1, "history was computed again"
            known, previous = usage["total_tokens"], asked["id"]
            calls = [item for item in asked["output"] if item["status"] == "completed"]
            assert calls and {item["type"] for item in calls} == {"function_call"}
            for call in calls:
                arguments = json.loads(call["arguments"])
                assert arguments == {} if call["name"] == "now" else len(arguments["city"]) <= 20
            items = [output_of(call, f"{20 + turn} C, rain") for call in calls]
        said = await ask(items, previous, tool_choice="none")
        assert said["output"][0]["content"][0]["text"]
        assert said["usage"]["input_tokens_details"]["cached_tokens"] >= known - 1
