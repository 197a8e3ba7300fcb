"""Large bodies are read in another process, and what comes of them is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from engine_actor.messages import TurnRequest
from serve_app.api import create_app
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.desk import Desk
from serve_app.openai.requests import INLINE_BYTES
from serve_app.openai.responses.memory_store import MemoryResponseStore
from serve_app.openai.responses.store import StoreLimits
from serve_app.text.prompts import PromptBuilder
from tests.http.http_harness import (
    CHAT,
    COMPLETIONS,
    MODEL,
    RESPONSES,
    Server,
    StartServer,
    connected,
    error_of,
    serving,
)
from tests.http.scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
MIB = 2**20


@dataclass
class Recorder:
    """In the place of the side process: notes what would go there, and does it here."""

    desk: Desk
    sizes: list[int] = field(default_factory=list)

    async def run(self, job: Callable[..., Any], *args: object, size: int) -> Any:
        self.sizes.append(size)
        return job(self.desk, *args)


@contextmanager
def recorded(prompts: PromptBuilder) -> Iterator[tuple[Recorder, httpx.Client]]:
    desk = Desk(IngressSettings(model_ids=(MODEL,)), prompts)
    recorder, engine = Recorder(desk), ScriptedEngine()
    engine.reply = [80]
    app = create_app(desk, recorder, engine, MemoryResponseStore(StoreLimits()))  # type: ignore[arg-type]
    with serving(app) as url, connected(url) as client:
        yield recorder, client


def padded(content: dict[str, Any], size: int) -> bytes:
    """With a field that nobody knows, so that the body has `size` bytes."""
    data = json.dumps(content | {"padding": ""}).encode()
    return json.dumps(content | {"padding": "x" * (size - len(data))}).encode()


def test_only_what_is_large_leaves_the_process(prompts: PromptBuilder) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "Hi"}),
        (RESPONSES, {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [80]}),
    ]
    with recorded(prompts) as (recorder, client):
        for path, content in bodies:
            assert client.post(path, content=padded(content, INLINE_BYTES)).status_code == 200
            assert recorder.sizes == []
            assert client.post(path, content=padded(content, INLINE_BYTES + 1)).status_code == 200
            assert recorder.sizes == [INLINE_BYTES + 1]
            recorder.sizes.clear()


def test_a_kept_conversation_counts_with_the_body_that_goes_on_from_it(prompts: PromptBuilder) -> None:
    with recorded(prompts) as (recorder, client):
        first = client.post(RESPONSES, json={"input": "x " * INLINE_BYTES}).json()["id"]
        recorder.sizes.clear()
        assert client.post(RESPONSES, json={"input": "b", "previous_response_id": first}).status_code == 200
        (size,) = recorder.sizes
        assert size > 2 * INLINE_BYTES


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (CHAT, {"messages": MESSAGES, "n": 2, "stop": ["zzz"], "seed": 5, "session_id": "s", "min_p": 0.1}),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "cache_salt": "salt"}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stream": True}),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (COMPLETIONS, {"prompt": ["Hi", "Ho"], "echo": True, "logit_bias": {"80": 1.5}}),
        (COMPLETIONS, {"prompt": [80, 81], "echo": True, "logprobs": None, "stream": True}),
        (RESPONSES, {"input": "Hi", "instructions": "Be kind.", "metadata": {"a": "b"}, "stream": True}),
        (RESPONSES, {"input": "Hi", "store": False, "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_large_body_asks_for_what_it_says(server: Server, path: str, content: dict[str, Any]) -> None:
    answers: list[str] = []
    asked: list[list[TurnRequest]] = []
    for size in (INLINE_BYTES, 4 * INLINE_BYTES):
        answer = server.client.post(path, content=padded(content, size))
        assert answer.status_code == 200, answer.text
        answers.append(answer.text)
        requests = [replace(request, request_id="", session_id="") for request in server.engine.requests]
        if "seed" not in content:  # one is drawn
            requests = [replace(r, sampling=replace(r.sampling, seed=0)) for r in requests]
        asked.append(requests)
        server.engine.requests.clear()
    assert asked[0] == asked[1]
    assert len(answers[0]) == len(answers[1])  # but for ids and times they are the same


def test_a_large_conversation_goes_on_by_its_id(start_server: StartServer) -> None:
    server = start_server()
    first = server.respond("word " * 5000, instructions="Not carried over.").json()
    second = server.respond("And then?", previous_response_id=first["id"])
    assert second.status_code == 200, second.text
    text = server.prompts.tokenizer.decode(server.engine.requests[-1].prompt_ids, control_tokens=True)
    assert text.count("word ") == 5000 and "And then?" in text and "Not carried over" not in text
    assert len({request.session_id for request in server.engine.requests}) == 1


def test_a_kept_conversation_that_is_larger_than_a_body_may_be_is_refused(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=4096)
    first = server.respond("a" * 3000).json()["id"]
    second = server.respond("b" * 2000, previous_response_id=first).json()["id"]
    refused = server.respond("c", previous_response_id=second)
    error = error_of(refused)
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"]


def huge(before: str, item: str, after: str) -> bytes:
    count = (4 * MIB - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


BIASES = json.dumps({"messages": MESSAGES, "logit_bias": dict.fromkeys(range(60_000), 1)}).encode()
SCHEMA_START = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ['
LONG_MESSAGE = json.dumps({"messages": [{"role": "user", "content": "a" * (4 * MIB - 100)}]}).encode()
CHAT_START = '{"messages": [{"role": "user", "content": "Hi"}], '
NASTY = {
    "tools of zeros": (CHAT, huge(CHAT_START + '"tools": [', "0", "]}"), None),
    "tools of objects": (CHAT, huge(CHAT_START + '"tools": [', "{}", "]}"), None),
    "messages of zeros": (CHAT, huge('{"messages": [', "0", "]}"), None),
    "4,096 zeros": (CHAT, json.dumps({"messages": [0] * 4096}).encode(), "messages.0"),
    "items of zeros": (RESPONSES, huge('{"input": [', "0", "]}"), None),
    "biases": (CHAT, BIASES, "logit_bias"),
    "a deep list": (CHAT, b'{"messages": ' + b"[" * (4 * MIB - 20), None),
    "one huge schema": (CHAT, huge(CHAT_START + SCHEMA_START, "0", "]}}}]}"), None),
    "ids": (COMPLETIONS, huge('{"prompt": [', "80", "]}"), "prompt"),
    "texts of a letter": (COMPLETIONS, huge('{"prompt": [', '"a"', "]}"), "prompt"),
    "a long text": (COMPLETIONS, json.dumps({"prompt": "a" * (4 * MIB - 100)}).encode(), "prompt"),
    "a long message": (CHAT, LONG_MESSAGE, "messages"),
    "a long input": (RESPONSES, json.dumps({"input": "a" * (4 * MIB - 100)}).encode(), "input"),
    "tokens": ("/detokenize", huge('{"tokens": [', "46778", "]}"), "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_what_is_large_and_nasty_is_a_400_that_says_why(server: Server, name: str) -> None:
    path, data, param = NASTY[name]
    refused = server.client.post(path, content=data)
    assert refused.status_code == 400, refused.text[:500]
    error = error_of(refused)
    assert error["param"] == param
    assert len(refused.content) < 1000
    assert server.engine.requests == []


def test_a_prompt_that_can_not_fit_is_refused_by_its_bytes(server: Server) -> None:
    for refused in (server.complete("a" * MIB), server.chat("a" * MIB), server.respond("a" * MIB)):
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "at least 1294" in error["message"]  # a MiB in pieces of 81 bytes, and a little for the template


def test_a_body_that_takes_too_long_to_read_is_413(start_server: StartServer) -> None:
    server = start_server(max_reading_seconds=0.05)
    refused = server.post("/tokenize", {"prompt": "7 é" * (MIB // 2)})
    assert (refused.status_code, error_of(refused)["code"]) == (413, "request_too_large")
