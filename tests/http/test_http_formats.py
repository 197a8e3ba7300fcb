"""The formats that clients know, byte for byte where it matters."""

from __future__ import annotations

import re

import pytest

from tests.http.http_harness import Server, events, streamed_text

USAGE = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 3}}


def test_a_whole_chat_answer(server: Server) -> None:
    response = server.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-moorage-replica"] == "replica-1"
    content = response.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", content.pop("id"))
    assert isinstance(content.pop("created"), int)
    usage = content.pop("usage")
    assert content == {
        "object": "chat.completion",
        "model": "smollm2",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }
    prompt = len(server.engine.requests[0].prompt_ids)
    assert usage == USAGE | {"prompt_tokens": prompt, "total_tokens": prompt + 3}


def test_a_streamed_chat_answer(server: Server) -> None:
    response = server.chat(stream=True)
    assert response.status_code == 200
    assert response.headers["x-moorage-replica"] == "replica-1"
    chunks = events(response)
    assert chunks.pop() == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert chunk["object"] == "chat.completion.chunk" and len(chunk["choices"]) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:] == [{"content": "Hello"}, {"content": " there"}, {"content": "!"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]


def test_a_whole_completion(server: Server) -> None:
    content = server.complete().json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", content["id"])
    assert content["object"] == "text_completion"
    assert content["choices"] == [{"index": 0, "text": "Hello there!", "logprobs": None, "finish_reason": "stop"}]
    assert content["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_streamed_completion_has_the_same_object_name(server: Server) -> None:
    chunks = events(server.complete(stream=True))
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " there", "!", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


@pytest.mark.parametrize("send", ["chat", "complete"])
def test_usage_comes_in_a_chunk_without_choices_when_asked_for(server: Server, send: str) -> None:
    chunks = events(getattr(server, send)(stream=True, stream_options={"include_usage": True}))
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    whole = getattr(server, send)().json()
    assert whole["usage"] == last["usage"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_does_not_come_when_it_was_not_asked_for(server: Server, options: object) -> None:
    chunks = events(server.chat(stream=True, stream_options=options))
    assert not any("usage" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_gives_finish_reason_length(server: Server, stream: bool) -> None:
    response = server.chat(max_tokens=2, stream=stream)
    if stream:
        assert events(response)[-2]["choices"][0]["finish_reason"] == "length"
        assert streamed_text(response) == "Hello there"
    else:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["choices"][0]["message"]["content"] == "Hello there"
        assert response.json()["usage"]["completion_tokens"] == 2


def test_an_answer_without_a_token_is_an_empty_text(server: Server) -> None:
    server.engine.reply = []
    assert server.chat().json()["choices"][0]["message"]["content"] == ""
    assert streamed_text(server.chat(stream=True)) == ""


def test_all_tokens_of_a_step_make_one_event(server: Server) -> None:
    server.engine.chunks = [2]
    assert [c["choices"][0]["delta"] for c in events(server.chat(stream=True))[1:-2]] == [
        {"content": "Hello there"},
        {"content": "!"},
    ]


def test_models(server: Server) -> None:
    content = server.client.get("/v1/models").json()
    assert content["object"] == "list"
    assert [(m["id"], m["object"], m["owned_by"]) for m in content["data"]] == [
        ("smollm2", "model", "moorage"),
        ("alias", "model", "moorage"),
    ]
    assert content["data"][0]["max_model_len"] == 512


def test_a_model_may_be_left_out_or_named_by_an_alias(server: Server) -> None:
    assert server.chat(model=None).json()["model"] == "smollm2"
    assert server.chat(model="alias").json()["model"] == "alias"


def test_health_and_ready(server: Server) -> None:
    assert server.client.get("/health").json() == {"status": "ok", "server": "moorage"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.engine.is_ready = False
    assert server.client.get("/health").status_code == 200
    response = server.client.get("/ready")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "unavailable"
