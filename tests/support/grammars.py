"""A vocabulary of letters and a few words, for engines over the synthetic model whose answers follow grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_actor.options import GrammarKind, GrammarSpec
from engine_actor.sampling.grammar_cursor import Cursor
from engine_actor.sampling.vocabulary import Vocabulary

PAD, EOS = 0, 1
_TEXTS = [*"abcdefghijklmnopqrstuvwxyz0123456789!| ", "yes", "no", "ab", "12", "aa", "!a"]
IDS = {text: 2 + i for i, text in enumerate(_TEXTS)}
TOKENS = [b"<pad>", b"<eos>", *(text.encode() for text in _TEXTS)]


def encode(text: str) -> list[int]:
    """Letter by letter."""
    return [IDS[letter] for letter in text]


def letters() -> Vocabulary:
    return Vocabulary(TOKENS, frozenset({PAD, EOS}), encode)


def alphabet(size: int, eos: int) -> Vocabulary:
    """One of small letters: token 0 is an a, and so on."""
    return Vocabulary(
        [bytes([97 + i]) for i in range(size)], frozenset({eos}), lambda text: [ord(c) - 97 for c in text]
    )


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern)


def schema(wanted: object) -> GrammarSpec:
    """A JSON schema."""
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(wanted))


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)


def allowed(cursor: Cursor, answer: list[int], vocab_size: int = 64) -> NDArray[np.bool_]:
    """Which tokens may follow, where not any may."""
    mask = cursor.mask(answer)
    assert mask is not None
    bits = np.unpackbits(mask, bitorder="little")
    assert not bits[vocab_size:].any()
    return bits[:vocab_size].astype(np.bool_)


def spell(tokens: Sequence[int]) -> str:
    """Ids without a text, which only an unguided answer has, are a question mark."""
    return b"".join(TOKENS[token] if token < len(TOKENS) else b"?" for token in tokens).decode()
