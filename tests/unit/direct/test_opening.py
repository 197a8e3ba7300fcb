"""What the picker can tell of a conversation from a header and the beginning of a body."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.direct.opening import conversation_name

USER = {"role": "user", "content": "What is the capital of France? \u00e9\U0001f600"}
SYSTEM = {"role": "system", "content": "Be brief."}
LATER = [{"role": "assistant", "content": "Paris. " * 50}, {"role": "user", "content": "And of Italy?"}]


def name(body: object, header: str | None = None) -> str | None:
    return conversation_name(header, json.dumps(body).encode())


def chat(*messages: object, **fields: object) -> dict[str, object]:
    return {"model": "m", "messages": list(messages), **fields}


def test_the_header_counts_most_and_the_body_is_then_not_looked_at() -> None:
    assert conversation_name("a", b"nonsense") == name(chat(USER), "a") != name(chat(USER), "b")


def test_a_session_in_the_body_is_the_one_in_the_header() -> None:
    assert name(chat(USER, session_id="a")) == conversation_name("a", b"")


def test_later_turns_have_the_name_of_the_first_one() -> None:
    first = name(chat(SYSTEM, USER))
    assert first is not None
    assert name(chat(SYSTEM, USER, *LATER)) == first
    assert name(chat(SYSTEM, USER, *LATER, temperature=0)) == first


def test_conversations_under_one_system_prompt_differ_by_what_the_user_says_first() -> None:
    assert name(chat(SYSTEM, USER)) != name(chat(SYSTEM, {"role": "user", "content": "Hello."}))
    assert name(chat(SYSTEM, USER)) != name({**chat(SYSTEM, USER), "model": "other"})


@pytest.mark.parametrize("field", ["user", "previous_response_id"])
def test_fields_that_name_a_conversation_count_before_its_beginning(field: str) -> None:
    assert name({field: "a", "input": "x"}) == name({"input": "y", field: "a"}) != name({"input": "y", field: "b"})


def test_a_prompt_is_known_by_its_beginning() -> None:
    long = "word " * 200
    assert name({"model": "m", "prompt": long}) == name({"model": "m", "prompt": long + "more"})
    assert name({"model": "m", "prompt": long}) != name({"model": "m", "prompt": "other"})
    ids = list(range(300))
    assert name({"model": "m", "prompt": ids}) == name({"model": "m", "prompt": [*ids, 7]})


@given(st.integers(0, 2000))
def test_a_body_that_is_cut_off_tells_what_it_can_and_nothing_wrong(cut: int) -> None:
    body = json.dumps(chat(SYSTEM, USER, *LATER), ensure_ascii=False).encode()
    whole = conversation_name(None, body)
    needed = body.index(b"assistant") - len(b'{"role": "')
    found = conversation_name(None, body[:cut])
    assert found == whole if cut >= needed else True


UNREADABLE = [
    b"",
    b"[]",
    b"null",
    b"{",
    b"{1: 2}",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"messages"',
    b'{"messages": [',
    b'{"messages": []}',
    b'{"messages": ' + b"[" * 100_000,
    b'{"messages": 5}',
    b'{"session_id": 5}',
    b'{"session_id": ""}',
    b'{"prompt": null}',
]


@pytest.mark.parametrize("body", UNREADABLE)
def test_what_cannot_be_read_names_nothing(body: bytes) -> None:
    assert conversation_name(None, body) is None
    assert conversation_name("", body) is None


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_body_raises(body: bytes) -> None:
    conversation_name(None, body)
    conversation_name(None, b'{"model": "m", "messages": [' + body)
