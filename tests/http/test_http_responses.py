"""POST /v1/responses and what is kept of it: formats, history, sessions, cancellation."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine_actor.messages import session_key
from serve_app.ingress.errors import retry_later
from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.openai.responses.store import StoredResponse, StoreLimits
from tests.http.http_harness import RESPONSES, Server, StartServer, error_of, named_events, wait_until
from tests.support.response_store import OLD

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def text_of(content: dict[str, Any]) -> str:
    text: str = content["output"][0]["content"][0]["text"]
    return text


def prompt_text(server: Server, turn: int = -1) -> str:
    return server.prompts.tokenizer.decode(server.engine.requests[turn].prompt_ids, control_tokens=True)


def test_a_whole_response(server: Server) -> None:
    answer = server.respond("Hi", metadata={"a": "b"}, user="u", instructions="Be brief.", max_output_tokens=50)
    assert answer.status_code == 200
    assert answer.headers["x-moorage-replica"] == "replica-1"
    content = answer.json()
    assert re.fullmatch(r"resp_[0-9a-f]{32}", content["id"])
    message = content.pop("output")[0]
    assert re.fullmatch(r"msg_[0-9a-f]{32}", message.pop("id"))
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello there!", "annotations": [], "logprobs": []}],
    }
    prompt = len(server.engine.requests[0].prompt_ids)
    assert content["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": prompt - 3},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 3,
    }
    expected: dict[str, Any] = {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "model": "smollm2",
        "previous_response_id": None,
        "store": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "user": "u",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
    }
    assert {name: content[name] for name in expected} == expected
    assert isinstance(content["created_at"], int)


def test_a_streamed_response(server: Server) -> None:
    answer = server.respond("Hi", stream=True)
    assert answer.headers["x-moorage-replica"] == "replica-1"
    assert "[DONE]" not in answer.text
    events = named_events(answer)
    kinds = [event["type"] for event in events]
    assert [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]] == ORDER
    assert kinds.count("response.output_text.delta") == 3
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begun, done = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert begun["id"] == done["id"] and done["status"] == "completed" and text_of(done) == "Hello there!"
    item = done["output"][0]
    assert {e["item_id"] for e in events if "item_id" in e} == {item["id"]} == {events[2]["item"]["id"]}
    assert {e[n] for e in events for n in ("output_index", "content_index") if n in e} == {0}
    assert events[2]["item"] == item | {"status": "in_progress", "content": []}
    assert events[3]["part"] == item["content"][0] | {"text": ""}
    assert "".join(e["delta"] for e in events if "delta" in e) == "Hello there!"
    assert events[-4]["text"] == "Hello there!"
    assert events[-3]["part"] == item["content"][0]
    assert events[-2]["item"] == item
    assert server.client.get(f"{RESPONSES}/{done['id']}").json() == done


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", [None, "there"])
def test_streamed_and_whole_responses_are_the_same(server: Server, limit: int, stop: str | None) -> None:
    fields: dict[str, Any] = {"max_output_tokens": limit, "stop": stop}
    whole = server.respond("Hi", **fields).json()
    events = named_events(server.respond("Hi", stream=True, **fields))
    streamed = events[-1]["response"]
    for content in (whole, streamed):
        for name in ("id", "created_at"):
            content.pop(name)
        content["output"][0].pop("id")
    assert streamed == whole
    cut = limit < 3 and not (stop and limit == 2)
    assert whole["status"] == ("incomplete" if cut else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert whole["output"][0]["status"] == whole["status"]


@pytest.mark.parametrize(
    "given",
    [
        "Hi",
        [{"role": "user", "content": "Hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    ],
)
def test_input_is_a_text_or_messages_of_parts(server: Server, given: Any) -> None:
    assert server.respond(given).status_code == 200
    server.chat("Hi")
    chat, response = server.engine.requests[1], server.engine.requests[0]
    assert response.prompt_ids == chat.prompt_ids


def test_output_items_can_come_back_as_input(server: Server) -> None:
    first = server.respond("Hi", store=False).json()
    again = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "More"}]
    assert server.respond(again, store=False).status_code == 200
    server.client.post(
        "/v1/chat/completions",
        json={
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello there!"},
                {"role": "user", "content": "More"},
            ]
        },
    )
    assert server.engine.requests[1].prompt_ids == server.engine.requests[2].prompt_ids
    assert server.engine.requests[1].spans == server.engine.requests[2].spans != ()


def test_a_chain_goes_on_from_everything_before_it(server: Server) -> None:
    previous = None
    for turn in range(4):
        answer = server.respond(f"question {turn}", previous_response_id=previous).json()
        assert answer["previous_response_id"] == previous
        previous = answer["id"]
    said = prompt_text(server)
    assert [said.count(f"question {turn}") for turn in range(4)] == [1] * 4
    assert said.count("Hello there!") == 3 == len(server.engine.requests[-1].spans)


def test_instructions_are_those_of_this_turn_alone(server: Server) -> None:
    first = server.respond("one", instructions="Speak like a pirate.").json()
    server.respond("two", previous_response_id=first["id"], instructions="Speak like a king.")
    assert "pirate" in prompt_text(server, 0)
    assert "king" in prompt_text(server) and "pirate" not in prompt_text(server)
    server.respond("three", previous_response_id=first["id"])
    assert "king" not in prompt_text(server) and "pirate" not in prompt_text(server)


def test_all_turns_of_a_chain_are_of_the_session_of_its_root(server: Server) -> None:
    root = server.respond("a").json()["id"]
    second = server.respond("b", previous_response_id=root).json()["id"]
    server.respond("c", previous_response_id=second)
    server.respond("c2", previous_response_id=second)  # a branch
    server.respond("d", previous_response_id=second, store=False)
    assert {request.session_id for request in server.engine.requests} == {root}
    assert set(server.engine.routing_keys) == {session_key("public", root)}
    server.respond("another")
    assert server.engine.requests[-1].session_id not in (None, root)


def test_a_named_session_is_carried_along_the_chain(server: Server) -> None:
    first = server.respond("a", headers={"x-session-id": "tea"}).json()["id"]
    server.respond("b", previous_response_id=first)
    assert [request.session_id for request in server.engine.requests] == ["tea", "tea"]
    server.respond("c", previous_response_id=first, session_id="milk")
    assert server.engine.requests[-1].session_id == "milk"


def test_a_branch_has_only_its_own_history(server: Server) -> None:
    root = server.respond("root").json()["id"]
    left = server.respond("to the left", previous_response_id=root).json()["id"]
    server.respond("to the right", previous_response_id=root)
    assert "left" not in prompt_text(server)
    server.respond("further", previous_response_id=left)
    assert "left" in prompt_text(server) and "right" not in prompt_text(server)


def test_what_is_not_stored_is_anonymous_and_can_not_be_found(server: Server) -> None:
    answer = server.respond("a", store=False).json()
    assert answer["store"] is False
    assert server.engine.requests[-1].session_id is None
    assert server.client.get(f"{RESPONSES}/{answer['id']}").status_code == 404
    refused = server.respond("b", previous_response_id=answer["id"])
    assert refused.status_code == 404
    error = error_of(refused)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "previous_response_id" in error["message"]


def test_of_what_is_not_kept_it_is_said_whether_the_store_lost_it(server: Server) -> None:
    item: Any = [{"type": "item_reference", "id": OLD["msg"]}, {"role": "user", "content": "a"}]
    refused = [
        server.respond("a", previous_response_id=OLD["resp"]),
        server.respond(item),
        server.client.get(f"{RESPONSES}/{OLD['resp']}"),
        server.client.delete(f"{RESPONSES}/{OLD['resp']}"),
    ]
    for response in refused:
        assert response.status_code == 404
        assert "lost with its process" in error_of(response)["message"]
    young = server.respond("a", store=False).json()["id"]
    for response in (server.respond("a", previous_response_id=young), server.client.get(f"{RESPONSES}/{young}")):
        assert "never stored, was deleted" in error_of(response)["message"]


def test_a_deleted_response_is_gone_and_nothing_goes_on_from_it(server: Server) -> None:
    first = server.respond("a").json()["id"]
    second = server.respond("b", previous_response_id=first).json()["id"]
    assert server.client.delete(f"{RESPONSES}/{first}").json() == {"id": first, "object": "response", "deleted": True}
    for method in ("get", "delete"):
        assert getattr(server.client, method)(f"{RESPONSES}/{first}").status_code == 404
    assert server.client.get(f"{RESPONSES}/{second}").status_code == 200
    for previous in (first, second):
        assert error_of(server.respond("c", previous_response_id=previous))["param"] == "previous_response_id"


def test_an_evicted_response_is_a_clear_404(start_server: StartServer) -> None:
    server = start_server(limits=StoreLimits(max_responses=2))
    first = server.respond("a").json()["id"]
    for _ in range(2):
        server.respond("b")
    refused = server.respond("c", previous_response_id=first)
    assert (refused.status_code, error_of(refused)["param"]) == (404, "previous_response_id")


def test_another_key_finds_nothing(start_server: StartServer) -> None:
    server = start_server(api_keys=("key-one", "key-two"))
    one, two = ({"authorization": f"Bearer key-{name}"} for name in ("one", "two"))
    made = server.respond("a secret", headers=one).json()["id"]
    assert server.client.get(f"{RESPONSES}/{made}", headers=two).status_code == 404
    assert server.client.delete(f"{RESPONSES}/{made}", headers=two).status_code == 404
    assert server.client.post(f"{RESPONSES}/{made}/cancel", headers=two).status_code == 404
    assert server.respond("b", headers=two, previous_response_id=made).status_code == 404
    assert server.respond("b", headers=one, previous_response_id=made).status_code == 200


def test_a_chain_beyond_the_limit_of_messages_is_refused(start_server: StartServer) -> None:
    server = start_server(max_messages=4)
    first = server.respond("a").json()["id"]
    second = server.respond("b", previous_response_id=first)
    assert second.status_code == 200
    refused = server.respond("c", previous_response_id=second.json()["id"])
    assert (refused.status_code, error_of(refused)["param"]) == (400, "input")


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_in_progress_can_be_cancelled(server: Server, stream: bool) -> None:
    server.say("one two three four five")
    server.engine.hold_at = 3
    made: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: made.append(server.respond("Hi", stream=stream)))
    asking.start()
    wait_until(lambda: server.engine.tokens_sent == 2)
    response_id = server.engine.requests[0].session_id  # the first of a chain gives its session the name
    running = server.client.get(f"{RESPONSES}/{response_id}").json()
    assert (running["status"], running["output"]) == ("in_progress", [])
    assert server.respond("too early", previous_response_id=response_id).status_code == 404
    cancelled = server.client.post(f"{RESPONSES}/{response_id}/cancel").json()
    assert (cancelled["id"], cancelled["status"]) == (response_id, "cancelled")
    asking.join(20)
    assert (server.engine.running, server.engine.closed) == (0, 1)
    assert server.engine.tokens_sent == 2  # it was never released
    final = named_events(made[0])[-1]["response"] if stream else made[0].json()
    assert (final["status"], final["incomplete_details"], text_of(final)) == ("cancelled", None, "one two")
    assert final["usage"]["output_tokens"] == 2
    assert server.client.get(f"{RESPONSES}/{response_id}").json() == final
    server.engine.hold_at = None
    assert server.respond("go on", previous_response_id=response_id).status_code == 200
    assert "one two" in prompt_text(server)


def test_only_what_is_in_progress_can_be_cancelled(server: Server) -> None:
    made = server.respond("a").json()["id"]
    refused = server.client.post(f"{RESPONSES}/{made}/cancel")
    assert (refused.status_code, error_of(refused)["code"]) == (400, "response_not_in_progress")
    assert server.client.get(f"{RESPONSES}/{made}").json()["status"] == "completed"


def test_a_client_that_leaves_leaves_no_response(server: Server) -> None:
    server.engine.hold_at = 2
    with server.client.stream("POST", RESPONSES, json={"input": "Hi", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        response_id = json.loads(next(lines)[6:])["response"]["id"]
        assert server.client.get(f"{RESPONSES}/{response_id}").status_code == 200
    wait_until(lambda: server.engine.closed == 1)
    wait_until(lambda: server.client.get(f"{RESPONSES}/{response_id}").status_code == 404)


@pytest.mark.parametrize("how", ["failed", "vanished", "raised"])
def test_a_failure_after_the_200_is_an_event(server: Server, how: str) -> None:
    if how == "failed":
        server.engine.failed = "the engine stopped"
    elif how == "vanished":
        server.engine.vanish = True
    else:
        server.engine.fail_at = 3
    answer = server.respond("Hi", stream=True)
    assert answer.status_code == 200
    events = named_events(answer)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "scripted" not in answer.text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert server.client.get(f"{RESPONSES}/{failed['id']}").status_code == 404
    assert server.engine.running == 0


def test_a_failure_of_a_whole_response_is_a_500(server: Server) -> None:
    server.engine.failed = "out of memory"
    assert error_of(server.respond("Hi"))["code"] == "engine_failed"
    server.engine.failed = None
    server.engine.fail_at = 0
    assert server.respond("Hi").status_code == 500
    server.engine.fail_at = None
    assert server.respond("Hi").status_code == 200


def test_a_store_that_is_gone_is_a_503_before_the_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(self: MemoryResponseStore, *args: object) -> AsyncIterator[bool]:
        raise retry_later(503, "gone", "unavailable", 1)
        yield

    monkeypatch.setattr(MemoryResponseStore, "hold", gone)
    for stream in (True, False):
        refused = server.respond("Hi", stream=stream)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
    assert (server.engine.running, server.engine.closed) == (0, 2)
    assert server.respond("Hi", store=False).status_code == 200


def test_a_response_that_can_not_be_kept_is_not_said_to_be_complete(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(self: MemoryResponseStore, stored: StoredResponse) -> None:
        raise retry_later(503, "gone", "unavailable", 1)

    monkeypatch.setattr(MemoryResponseStore, "put", gone)
    assert server.respond("Hi").status_code == 503
    kinds = [event["type"] for event in named_events(server.respond("Hi", stream=True))]
    assert kinds[-1] == "response.failed" and "response.completed" not in kinds


def test_an_answer_goes_on_when_only_its_watch_is_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(self: MemoryResponseStore, *args: object) -> AsyncIterator[bool]:
        yield False
        raise OSError("the store's process is gone")

    monkeypatch.setattr(MemoryResponseStore, "hold", breaks)
    assert text_of(server.respond("Hi").json()) == "Hello there!"


def test_a_prompt_beyond_the_context_names_the_input(server: Server) -> None:
    refused = server.respond("word " * 600)
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


@pytest.mark.parametrize("query", ["stream=true", "include=usage", "starting_after=3"])
def test_a_kept_response_is_only_served_whole(server: Server, query: str) -> None:
    made = server.respond("a").json()["id"]
    refused = server.client.get(f"{RESPONSES}/{made}?{query}")
    assert (refused.status_code, error_of(refused)["param"]) == (400, query.partition("=")[0])
    assert server.client.get(f"{RESPONSES}/{made}?stream=false").status_code == 200
