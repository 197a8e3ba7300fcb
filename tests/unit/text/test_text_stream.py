from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.stream import AnswerText, StopMatcher, TokenPlaces
from serve_app.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 49151) | st.integers(17, 300), max_size=60)
MIXED = "Emoji 😀👩‍👩‍👧 中文字 é̂ Ω and plain"


def run(tokenizer: Tokenizer, ids: list[int], stops: list[str], sizes: list[int]) -> tuple[list[str], AnswerText]:
    """Pushes the ids in chunks of these sizes, over and over; the pieces of text as they came out."""
    answer, pieces, at, turn = AnswerText(tokenizer, stops), [], 0, 0
    while at < len(ids) and not answer.stopped:
        size = sizes[turn % len(sizes)]
        pieces.append(answer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, answer.finish()], answer


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What decoding everything at once gives, less a last character whose bytes are not complete."""
    special = tokenizer.token_bytes.special
    data = b"".join(tokenizer.token_bytes[i] for i in ids if i not in special)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


@settings(max_examples=300, deadline=None)
@given(ids=IDS, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_streamed_text_is_the_decoded_text(smollm2: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    pieces, answer = run(smollm2, ids, [], sizes)
    text = "".join(pieces)
    assert text == whole(smollm2, ids)
    assert smollm2.decode(ids, continuation=True).startswith(text)
    assert answer.tokens == len(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=60), sizes=st.lists(st.integers(1, 7), min_size=1))
def test_streamed_text_is_the_decoded_text_for_sentencepiece(
    sentencepiece: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    assert "".join(run(sentencepiece, ids, [], sizes)[0]) == whole(sentencepiece, ids)


def test_no_piece_holds_half_a_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(MIXED, special_tokens=False)
    pieces, _ = run(smollm2, ids, [], [1])
    assert "".join(pieces) == MIXED
    assert not any("�" in piece for piece in pieces)
    assert any(piece == "" for piece in pieces[:-1])  # the test is about characters that are spread over tokens


def test_an_unfinished_last_character_is_dropped(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hi 😀", special_tokens=False)
    for cut in range(1, len(ids) + 1):
        text = "".join(run(smollm2, ids[:cut], [], [1])[0])
        assert "Hi 😀".startswith(text)


def test_a_replacement_character_of_the_model_is_kept(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a�b", special_tokens=False)
    assert "".join(run(smollm2, ids, [], [1])[0]) == "a�b"


def reference_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_the_cut_is_the_first_completed_stop_however_text_arrives(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher, shown, at, turn = StopMatcher(stops), "", 0, 0
    wanted, matched = reference_cut(text, stops)
    while at < len(text) and not matcher.matched:
        size = sizes[turn % len(sizes)]
        shown += matcher.push(text[at : at + size])
        assert wanted.startswith(shown)  # nothing that a stop string would cut has been shown
        at, turn = at + size, turn + 1
    assert (shown + matcher.finish(), matcher.matched) == (wanted, matched)


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("start", [0, 3, 7, 11])
def test_stop_strings_of_any_length_at_any_place(smollm2: Tokenizer, start: int, length: int) -> None:
    text = "Paris 😀 is the capital of France."
    ids = smollm2.encode(text, special_tokens=False)
    stop = text[start : start + length]
    wanted = text[: text.find(stop)]
    for size in (1, 2, len(ids)):
        pieces, answer = run(smollm2, ids, [stop], [size])
        assert ("".join(pieces), answer.stopped) == (wanted, True)
    assert smollm2.decode(ids[: answer.tokens]).find(stop) >= 0
    assert smollm2.decode(ids[: answer.tokens - 1]).find(stop) < 0


def test_what_was_held_back_for_a_stop_comes_at_the_end(smollm2: Tokenizer) -> None:
    answer = AnswerText(smollm2, ["END NOW"])
    shown = answer.push(smollm2.encode("The END", special_tokens=False))
    assert shown == "The "
    assert answer.finish() == "END"


def test_what_is_kept_between_tokens_does_not_grow_with_the_text(smollm2: Tokenizer) -> None:
    answer = AnswerText(smollm2, ["x" * 20])
    word = smollm2.encode(" thexxxxx", special_tokens=False)
    for _ in range(500):
        answer.push(word)
        assert 5 <= len(answer._matcher._held) < 20


@settings(max_examples=300, deadline=None)
@given(
    ids=IDS,
    stops=st.lists(st.text("abe \u4e2d", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_places_of_tokens_do_not_depend_on_how_they_arrive(
    smollm2: Tokenizer, ids: list[int], stops: list[str], sizes: list[int]
) -> None:
    def told(sizes: list[int]) -> tuple[str, list[int], AnswerText]:
        places, text, out, at, turn = TokenPlaces(), "", [], 0, 0
        answer = AnswerText(smollm2, stops, places)
        while at < len(ids) and not answer.stopped:
            size = sizes[turn % len(sizes)]
            text += answer.push(ids[at : at + size])
            out += places.drain()
            at, turn = at + size, turn + 1
        if not answer.stopped:
            text += answer.finish()
        return text, out + places.drain(), answer

    text, out, answer = told(sizes)
    again, same, _ = told([1])
    assert (text, out) == (again, same)
    assert out == sorted(out) and all(at <= len(text) for at in out)
    if answer.stopped:
        # All before the stop string is told, and nothing that stands in it but control tokens at its beginning.
        assert len(out) <= answer.tokens
        special = smollm2.token_bytes.special
        assert all(at < len(text) or token in special for at, token in zip(out, ids, strict=False))
    else:
        assert len(out) == len(ids)
