"""Logprobs belong to the tokens of the text that was sent, streamed and whole."""

from __future__ import annotations

import random
from typing import Any

import openai
import pytest

from tests.http.http_harness import MODEL, Server, events
from tests.http.scripted_engine import logprob_of

MIXED = "Emoji 😀👩‍👩‍👧 中文字 é̂ Ω, then plain."

Entries = list[dict[str, Any]]


def whole_chat(server: Server, **fields: Any) -> tuple[str, Entries]:
    choice = server.chat(logprobs=True, **fields).json()["choices"][0]
    assert choice["logprobs"]["refusal"] is None
    return choice["message"]["content"], choice["logprobs"]["content"]


def streamed_chat(server: Server, **fields: Any) -> tuple[str, Entries]:
    text, entries = "", []
    for event in events(server.chat(logprobs=True, stream=True, **fields))[:-1]:
        choice = event["choices"][0]
        text += choice["delta"].get("content", "")
        entries += (choice["logprobs"] or {"content": []})["content"]
    return text, entries


def spelled(entries: Entries) -> bytes:
    return bytes(byte for entry in entries for byte in entry["bytes"])


@pytest.mark.parametrize("chunks", [[1], [2], [3, 1], [100]])
def test_the_bytes_of_the_entries_spell_the_text(server: Server, chunks: list[int]) -> None:
    server.say(MIXED)
    server.engine.chunks = chunks
    text, entries = whole_chat(server, top_logprobs=2)
    assert streamed_chat(server, top_logprobs=2) == (text, entries)
    assert spelled(entries).decode() == text == MIXED
    assert len(entries) == len(server.engine.reply)
    spelling = server.prompts.tokenizer.token_bytes
    for token, entry in zip(server.engine.reply, entries, strict=True):
        expected = logprob_of(token, 2)
        assert entry["logprob"] == expected.logprob
        assert entry["token"] == spelling[token].decode(errors="replace")
        assert [(t["bytes"], t["logprob"]) for t in entry["top_logprobs"]] == [
            (list(spelling[t]), p) for t, p in expected.top
        ]


@pytest.mark.parametrize("stop", [None, "文字 x"])
def test_no_entry_goes_out_before_its_text(server: Server, stop: str | None) -> None:
    server.say(MIXED)
    text, entries = b"", []
    for event in events(server.chat(logprobs=True, stream=True, stop=stop))[:-2]:
        choice = event["choices"][0]
        text += choice["delta"].get("content", "").encode()
        entries += (choice["logprobs"] or {"content": []})["content"]
        # A token whose characters are not all out yet may still be waiting, and only such a one.
        assert text.startswith(spelled(entries))
        assert len(text) - len(spelled(entries)) < 12


@pytest.mark.parametrize("limit", range(1, 13))
def test_a_cut_character_keeps_its_tokens(server: Server, limit: int) -> None:
    server.say("😀中👩‍👩‍👧é")
    text, entries = whole_chat(server, max_tokens=limit)
    assert streamed_chat(server, max_tokens=limit) == (text, entries)
    assert len(entries) == min(limit, len(server.engine.reply))
    assert spelled(entries).startswith(text.encode())


@pytest.mark.parametrize("chunks", [[1], [3], [100]])
@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("start", [0, 3, 7, 8, 20, 30])
def test_tokens_cut_by_a_stop_string_have_no_entry(server: Server, start: int, length: int, chunks: list[int]) -> None:
    server.say(MIXED)
    server.engine.chunks = chunks
    stop = MIXED[start : start + length]
    text, entries = whole_chat(server, stop=stop)
    assert streamed_chat(server, stop=stop) == (text, entries)
    assert text == MIXED[: MIXED.find(stop)]
    data = spelled(entries)
    assert data.startswith(text.encode())
    # Only a token that the stop string cut in two goes beyond the text.
    assert not entries or len(data) - len(entries[-1]["bytes"]) < len(text.encode())


@pytest.mark.parametrize("seed", range(6))
def test_random_tokens_are_the_same_streamed_and_whole(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    server.engine.reply = [rng.choice([rng.randrange(49000), rng.randrange(300), rng.randrange(17)]) for _ in range(60)]
    server.engine.chunks = [rng.randint(1, 6) for _ in range(5)]
    for fields in ({}, {"stop": ["e", "ab"]}, {"max_tokens": 17}):
        assert streamed_chat(server, **fields) == whole_chat(server, **fields)


def test_what_was_not_asked_for_does_not_come(server: Server) -> None:
    assert server.chat().json()["choices"][0]["logprobs"] is None
    assert all(e["choices"][0]["logprobs"] is None for e in events(server.chat(stream=True))[:-1])
    assert server.engine.requests[-1].logprobs is None
    _, entries = whole_chat(server)
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert server.engine.requests[-1].logprobs == 0


def test_an_answer_without_a_token_has_no_entry(server: Server) -> None:
    server.engine.reply = []
    assert whole_chat(server) == streamed_chat(server) == ("", [])


def legacy(choice: dict[str, Any], into: dict[str, list[Any]]) -> None:
    for name, values in (choice["logprobs"] or {}).items():
        into.setdefault(name, []).extend(values)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}, {"stop": "文"}, {"stop": "plain"}])
def test_completions_have_their_own_format(server: Server, fields: dict[str, Any]) -> None:
    server.say(MIXED)
    choice = server.complete(logprobs=2, **fields).json()["choices"][0]
    streamed: dict[str, list[Any]] = {}
    for event in events(server.complete(logprobs=2, stream=True, **fields))[:-1]:
        legacy(event["choices"][0], streamed)
    found = choice["logprobs"]
    assert streamed == found
    count = len(found["tokens"])
    assert all(len(found[name]) == count for name in ("token_logprobs", "top_logprobs", "text_offset"))
    spelling = server.prompts.tokenizer.token_bytes
    for i, token in enumerate(server.engine.reply[:count]):
        before = b"".join(spelling[t] for t in server.engine.reply[:i])
        assert found["text_offset"][i] == len(before.decode(errors="ignore"))
        assert found["token_logprobs"][i] == logprob_of(token, 2).logprob
        assert found["top_logprobs"][i][found["tokens"][i]] == found["token_logprobs"][i]
        name, data = found["tokens"][i], spelling[token]
        assert name.startswith("bytes:\\x") if data.decode(errors="replace").encode() != data else name.encode() == data


def test_logprobs_0_names_the_token_alone(server: Server) -> None:
    found = server.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["Hello", " there", "!"]
    assert [list(top) for top in found["top_logprobs"]] == [["Hello"], [" there"], ["!"]]
    assert found["text_offset"] == [0, 5, 11]


def test_every_choice_has_its_own(server: Server) -> None:
    encode = server.prompts.tokenizer.encode
    texts = ["Yes 😀.", "No, by no means."]
    server.engine.replies = [encode(text, special_tokens=False) for text in texts]
    for choice, text in zip(server.chat(n=2, logprobs=True).json()["choices"], texts, strict=True):
        assert spelled(choice["logprobs"]["content"]).decode() == text
    streamed: list[Entries] = [[], []]
    for event in events(server.chat(n=2, logprobs=True, stream=True))[:-1]:
        choice = event["choices"][0]
        streamed[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert [spelled(entries).decode() for entries in streamed] == texts


def test_the_openai_client(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 3}
        whole = client.chat.completions.create(**fields).choices[0].logprobs
        assert whole is not None and whole.content is not None
        assert [entry.token for entry in whole.content] == ["Hello", " there", "!"]
        assert len(whole.content[0].top_logprobs) == 3
        with client.chat.completions.stream(**fields) as stream:
            assert stream.get_final_completion().choices[0].logprobs == whole
        legacy = client.completions.create(model=MODEL, prompt="Once", logprobs=1).choices[0].logprobs
        assert legacy is not None and legacy.tokens == ["Hello", " there", "!"]
