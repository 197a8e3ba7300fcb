"""Events that are put together from prepared parts are, byte for byte, those that a JSON encoder writes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from serve_app.openai.choices import Piece
from serve_app.openai.formats import ChatFormat, CompletionFormat
from serve_app.openai.sse import TextEvents, event

# What JSON escapes, what looks like an end of the text, and anything else that UTF-8 can write.
TEXTS = st.text(
    st.sampled_from('"\\\n\x00\x1f\x7f/é€😀 :{}\x0b\x0c\r\x1c\x85\u2028\u2029')
    | st.characters(exclude_categories=["Cs"]),
    max_size=20,
)


ENDS_OF_LINES = [chr(i) for i in range(0x3000) if len(f"a{chr(i)}b".splitlines()) > 1]


def encoded(content: dict[str, object]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for character in ENDS_OF_LINES:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f"data: {text}\n\n".encode()


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


@given(TEXTS, TEXTS)
def test_an_event_is_one_line_wherever_a_client_cuts(name: str, text: str) -> None:
    assert len(ENDS_OF_LINES) == 10
    for sent in (event({"text": text, name: name}), TextEvents(lambda _: {name: ""}).event(0, text)):
        assert sent.endswith(b"\n\n")
        (line,) = sent.decode()[:-2].splitlines()
        assert text in json.loads(line.removeprefix("data: ")).values()
