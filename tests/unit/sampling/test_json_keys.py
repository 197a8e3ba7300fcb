"""No key of an object comes twice, whatever else may."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine_actor.sampling.grammar_cursor import Cursor
from engine_actor.sampling.grammars import Grammars
from engine_actor.sampling.vocabulary import Vocabulary
from serve_app.openai.schemas.kept import kept_schema
from serve_app.openai.tools import calling_grammar
from serve_app.text.calls import OPENING
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.grammars import allowed, schema

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def real(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.eos_token_ids)


def first_refused(cursor: Cursor, ids: list[int]) -> int | None:
    """The place of the first token that the masks do not allow."""
    for i, token in enumerate(ids):
        mask = cursor.mask(ids[:i])
        if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
            return i
    return None


FINE = (
    '{"a": 1, "b": {"a": 1, "b": [{"a": 1}, {"a": 2}]}, "c": "\\"b\\": 1, \\"b\\": 2", "d": ["a", "a"]}',
    '{"a": 1, "aa": 1, "aaa": 2, "": 0, "b\\n": 1, "b\\\\": 2, "b\\"": 3, "\\u0001": "\\n", "é": 1, "😀": 2}',
)
TWICE = (
    '{"b": 1, "b',
    '{"b": 1, "c": 2, "b',
    '{"b": {}, "c": [[{"x": 1}], {"x": 1}], "b',
    '{"c": {"x": "y", "x',
    '{"": 1, "',
    '{"b\\n": 1, "b\\n',
    '{"é": 1, "é',
    '{"x": "a\\\\", "y": "\\"", "x',
)
ALIASES = ('{"\\u0061', '{"b": 1, "\\u0062', '{"\\/', '{"\\u000A', '{"\\u000a', '{"c": ["\\u0061"], "\\u00e9')


@pytest.mark.parametrize("wanted", [{"type": "object"}, OPEN], ids=["any object", "an open one"])
@pytest.mark.parametrize("letters", [False, True], ids=["tokens", "letters"])
def test_a_key_comes_once_and_in_one_spelling(
    tokenizer: Tokenizer, real: Grammars, wanted: dict[str, object], letters: bool
) -> None:
    def ids_of(text: str) -> list[int]:
        parts = text if letters else [text]
        return [token for part in parts for token in tokenizer.encode(part, special_tokens=False)]

    def refused(text: str) -> int | None:
        return first_refused(real.cursor(schema(wanted)), ids_of(text))

    for text in FINE:
        assert refused(text) is None, text
    for text in TWICE:
        assert refused(text) is None, text
        assert refused(text + '": 3') is not None, text
        assert refused(text + 'z": 3') is None, text
    for text in ALIASES:
        assert refused(text) is not None, text


def test_tokens_of_several_keys_are_read_whole() -> None:
    """As a vocabulary may have them."""
    texts = ["<eos>", '{"', "b", '": 1, "', '": 1, "b": 2, "', '", "b": "', '": "', '"', "}", '": 1}', "\\u0062"]
    tokens = [text.encode() for text in texts]
    made = Grammars(lambda: Vocabulary(tokens, frozenset({0}), lambda text: []), 64, frozenset({0}))

    def goes_on(*said: str) -> set[str]:
        may = allowed(made.cursor(schema({"type": "object"})), [texts.index(text) for text in said])
        return {texts[token] for token in np.flatnonzero(may)}

    assert '": 1, "b": 2, "' in goes_on('{"')
    begun = goes_on('{"', "b")
    assert {'": 1, "', '": 1}', '": "'} <= begun and not {'": 1, "b": 2, "', "\\u0062"} & begun
    assert '", "b": "' in goes_on('{"', "}", '": "') - goes_on('{"', "b", '": "')
    assert not {'"', '": "', '": 1, "', '": 1}'} & goes_on('{"', "b", '": 1, "', "b")


def test_each_call_has_keys_of_its_own(tokenizer: Tokenizer, real: Grammars) -> None:
    kept = kept_schema(json.dumps({"type": "object"}), lenient=True, closes=True).text
    call = OPENING + '\n{"name": "f", "arguments": %s}\n</tool_call>'
    for must, before in ((True, ""), (False, 'Say "b" and "b": ')):
        grammar = calling_grammar({"f": kept}, must=must, several=True)
        fine = before + call % '{"b": 1, "name": 2}' + "\n" + call % '{"b": 1}'
        twice = before + call % '{"b": 1}' + "\n" + call % '{"b": 1, "b": 2}'
        for text, is_fine in ((fine, True), (twice, False)):
            ids = tokenizer.encode(text, special_tokens=False)
            assert (first_refused(real.cursor(grammar), ids) is None) == is_fine


def test_whatever_is_chosen_no_key_comes_twice(tokenizer: Tokenizer, real: Grammars) -> None:
    def ids(*texts: str) -> list[int]:
        return [tokenizer.encode(text, special_tokens=False)[0] for text in texts]

    sizes: list[int] = []

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        sizes.append(len(pairs))
        return dict(pairs)

    rng = np.random.default_rng(0)
    liked = np.array(ids('"', '":', '",', ' "', "a", "b", "1", " 1", "{", "[", ",", ":", " ", "\\"))
    ending = [*sorted(tokenizer.eos_token_ids), *ids('"', "}", "]", ":", " ", "1", "a")]
    for _ in range(12):
        cursor = real.cursor(schema({"type": "object"}))
        answer: list[int] = []
        while not set(answer) & tokenizer.eos_token_ids:
            assert len(answer) < 200
            may = allowed(cursor, answer, tokenizer.vocab_size)
            choices = liked[may[liked]]
            if len(answer) < 40 and len(choices):
                answer.append(int(rng.choice(choices)))
            else:
                answer.append(next(token for token in ending if may[token]))
        text = b"".join(tokenizer.token_bytes[token] for token in answer[:-1]).decode()
        json.loads(text, object_pairs_hook=once)
    assert max(sizes) > 1
