"""What a grammar must know of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens   the bytes of each token by id
    special  control tokens: no text is made of them
    encode   ids of a text that stands in the middle of a sequence
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    encode: Callable[[str], list[int]]


class Words:
    """A vocabulary as the library reads it. It asks for the ids of a text where only that text can follow."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_id: int) -> None:
        tokens = list(vocabulary.tokens[:vocab_size])
        self.tokens = tokens + [b""] * (vocab_size - len(tokens))
        self.special = vocabulary.special
        self.special_token_ids = sorted(i for i in vocabulary.special if i < vocab_size)
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
