"""Events that are put together from prepared parts are, byte for byte, those that a JSON encoder writes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from serve_app.openai.choices import Piece
from serve_app.openai.formats import ChatFormat, CompletionFormat
from serve_app.openai.sse import TextEvents, event

# What JSON escapes, what looks like an end of the text, and anything else that UTF-8 can write.
TEXTS = st.text(st.sampled_from('"\\\n\x00\x1f\x7f/é€😀 :{}') | st.characters(exclude_categories=["Cs"]), max_size=20)


def encoded(content: dict[str, object]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


@given(TEXTS, st.booleans(), st.lists(st.tuples(st.integers(0, 3), TEXTS), min_size=1, max_size=6))
def test_pieces_of_a_chat_are_the_chunks_that_json_writes(
    model: str, usage: bool, pieces: list[tuple[int, str]]
) -> None:
    form = ChatFormat(model, 4, usage, None)
    for choice, text in pieces:
        shown = {"index": choice, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        head = {"id": form.id, "object": "chat.completion.chunk", "created": form.created, "model": model}
        chunk = head | {"choices": [shown]} | ({"usage": None} if usage else {})
        assert form.piece(Piece(choice, text)) == encoded(chunk)


@given(TEXTS, st.booleans(), st.lists(st.tuples(st.integers(0, 3), TEXTS), min_size=1, max_size=6))
def test_pieces_of_a_completion_are_the_chunks_that_json_writes(
    model: str, usage: bool, pieces: list[tuple[int, str]]
) -> None:
    form = CompletionFormat(model, usage, None, ["", "", "", ""])
    for choice, text in pieces:
        shown = {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
        head = {"id": form.id, "object": "text_completion", "created": form.created, "model": model}
        chunk = head | {"choices": [shown]} | ({"usage": None} if usage else {})
        assert form.piece(Piece(choice, text)) == encoded(chunk)


@given(TEXTS, TEXTS)
def test_only_the_last_empty_text_is_filled(name: str, text: str) -> None:
    made = TextEvents(lambda choice: {"type": name, "": "", "n": choice, "text": "", "end": [None, {}]})
    assert made.event(7, text) == event({"type": name, "": "", "n": 7, "text": text, "end": [None, {}]})
