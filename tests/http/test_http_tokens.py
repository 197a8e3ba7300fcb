"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.bad_input import values
from tests.http.http_harness import Server, StartServer, error_of

MESSAGES = [{"role": "user", "content": "Hi 😀"}]


def tokenize(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def test_a_text_is_what_a_completion_of_it_sends(server: Server) -> None:
    content = tokenize(server, model="smollm2", prompt="Once upon a 😀")
    server.complete("Once upon a 😀")
    ids = list(server.engine.requests[0].prompt_ids)
    assert content == {"count": len(ids), "max_model_len": 512, "tokens": ids}


def test_messages_are_what_a_chat_of_them_sends(server: Server) -> None:
    content = tokenize(server, messages=MESSAGES)
    server.chat("Hi 😀")
    assert content["tokens"] == list(server.engine.requests[0].prompt_ids)


def test_empty_and_large_texts(server: Server) -> None:
    assert tokenize(server, prompt="") == {"count": 0, "max_model_len": 512, "tokens": []}
    large = tokenize(server, prompt="word " * 20_000)
    assert large["count"] == len(large["tokens"]) > 20_000


@pytest.mark.parametrize("text", ["plain", "<|im_start|>user\nHi<|im_end|>", "é̂ 中文 👩‍👩‍👧", "\x00\r\n", ""])
def test_tokens_turn_back_into_their_text(server: Server, text: str) -> None:
    tokens = tokenize(server, prompt=text, add_special_tokens=False)["tokens"]
    response = server.post("/detokenize", {"model": "smollm2", "tokens": tokens})
    assert response.json() == {"prompt": text}


def test_the_longest_sequence_is_asked_of_the_engines(start_server: StartServer) -> None:
    server = start_server()
    assert tokenize(server, prompt="a")["max_model_len"] is None
    server.engine.longest = 300
    assert tokenize(server, prompt="a")["max_model_len"] == 300
    assert server.client.get("/v1/models/smollm2").json()["max_model_len"] == 300
    refused = server.complete([5] * 300)
    error = error_of(refused)
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "300 tokens" in error["message"]
    assert server.complete([5] * 299).status_code == 200
    assert [request.max_generated_tokens for request in server.engine.requests] == [1]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        *[("/tokenize", {"prompt": value}, "prompt") for value in values(5, True, ["a"], {}, "\ud800")],
        *[("/tokenize", {"messages": value}, "messages") for value in values([], "a", 5, {})],
        ("/tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ("/tokenize", {"messages": MESSAGES * 4097}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        *[
            ("/tokenize", {"prompt": "a", "add_special_tokens": value}, "add_special_tokens")
            for value in values(1, "no", [])
        ],
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "model": 5}, "model"),
        ("/detokenize", {}, "tokens"),
        *[("/detokenize", {"tokens": value}, "tokens") for value in values(None, "a", 5, {}, [-1], [49152], [2**70])],
        *[("/detokenize", {"tokens": [value]}, "tokens.0") for value in values("1", True, 1.0, None, [])],
    ],
)
def test_bad_requests_are_refused_by_name(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    response = server.client.post(path, content=json.dumps(fields).encode())
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200


def test_an_unknown_model_is_not_found(server: Server) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert error_of(server.post(path, {**fields, "model": "gpt-4"}))["code"] == "model_not_found"
