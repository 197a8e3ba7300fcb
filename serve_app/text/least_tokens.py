"""How many tokens a text has at least, by its bytes alone: a prompt that can't fit is refused before it is tokenized.

A token stands for a bounded number of bytes of the text only if nothing between the two takes text away. What is known
to take none is named here; with anything else there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

from serve_app.text.token_bytes import TokenBytes

# By how much the bytes of a text can shrink at most. NFC makes one syllable of three letters of Hangul.
_NORMALIZERS = {"NFC": 3, "Prepend": 1, "Replace": 1}
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


class LeastTokens:
    def __init__(self, backend: Backend, token_bytes: TokenBytes) -> None:
        """Spells every token, which takes up to a second."""
        pieces = [token_bytes[i] for i in range(len(token_bytes))]
        single = {piece[0] for piece in pieces if len(piece) == 1}
        self._lost = bytes(byte for byte in range(256) if byte not in single)
        shrinks = _shrinks(backend, loses_bytes=bool(self._lost))
        self._longest = None if shrinks is None else shrinks * max(map(len, pieces), default=1)

    def __call__(self, text: str) -> int:
        """0 where there is no bound."""
        if self._longest is None:
            return 0
        # A byte without a token may leave nothing behind.
        size = len(text.encode().translate(None, self._lost))
        return -(-size // self._longest)


def _shrinks(backend: Backend, *, loses_bytes: bool) -> int | None:
    """None: by any number."""
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # they swallow the space around them
    pre_tokenizers = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    if not byte_level and (loses_bytes or not getattr(backend.model, "byte_fallback", False)):
        return None  # any number of unknown characters can be one token
    for step in pre_tokenizers:
        if step["type"] not in _PRE_TOKENIZERS or step.get("behavior") == "Removed":
            return None
    shrinks = 1
    for step in _steps(backend.normalizer, "normalizers"):
        replaces_one = step.get("pattern", {"String": " "}) == {"String": " "} and step.get("content", "▁") == "▁"
        if step["type"] not in _NORMALIZERS or not replaces_one:
            return None
        shrinks *= _NORMALIZERS[step["type"]]
    return shrinks


def _steps(component: Any, parts: str) -> Iterator[dict[str, Any]]:
    # The library shows a component's settings in its pickled state only, which is JSON.
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), parts)


def _flat(state: dict[str, Any], parts: str) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for part in state[parts]:
        yield from _flat(part, parts)
