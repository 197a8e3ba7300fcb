"""What each token adds to the text, as bytes.

Both kinds of tokenizers that language models use can be seen this way, and everything that must be exact is
then simple: text is the UTF-8 decoding of the joined bytes, a character that is spread over tokens is a
matter of an incremental decoder, and a position in a text is a token boundary exactly when it is a sum of
lengths.
"""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer as Backend

from serve_app.text.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _gpt2_bytes() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is printable, else from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_GPT2_BYTES = _gpt2_bytes()


class TokenBytes:
    """Bytes of every token of one tokenizer, found when first asked for.

    special       ids of control tokens, which are never part of an answer's text
    strips_space  a text that starts the sequence loses one leading space when it is decoded
    """

    def __init__(self, backend: Backend) -> None:
        """Raises TokenizerError if the tokenizer's decoder is neither byte-level nor SentencePiece-like."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self._added = frozenset(added)
        steps = _decoder_steps(backend)
        kinds = {str(step.get("type")) for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise TokenizerError(f"decoder {sorted(kinds)} is neither byte-level nor SentencePiece-like")
        self.strips_space = any(
            (step.get("type") == "Strip" and step.get("start") == 1)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        self._table: list[bytes | None] = [None] * backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, token_id: int) -> bytes:
        """b"" for an id without a token: the logits of a model can be wider than its vocabulary."""
        if not 0 <= token_id < len(self._table):
            return b""
        spelling = self._table[token_id]
        if spelling is None:
            spelling = self._table[token_id] = self._spell(token_id)
        return spelling

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            if token_id in self._added or any(c not in _GPT2_BYTES for c in token):
                return token.encode()
            return bytes(_GPT2_BYTES[c] for c in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _decoder_steps(backend: Backend) -> list[dict[str, object]]:
    if backend.decoder is None:
        raise TokenizerError("the tokenizer has no decoder")
    # The library shows a component's settings in its pickled state only, which is JSON.
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, object]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps
