"""A tokenizer like another one, with a chat template or ends of its own."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from serve_app.text.tokenizer import Tokenizer


def backend_of(tokenizer: Tokenizer) -> Backend:
    """The library's tokenizer behind it, shared."""
    return tokenizer._backend


def with_template(tokenizer: Tokenizer, source: str | None, ends: frozenset[int] | None = None) -> Tokenizer:
    """The same tokens with the chat template `source`; None: with none. `ends`: other ids that end a text."""
    return Tokenizer(
        backend_of(tokenizer),
        tokenizer.eos_token_ids if ends is None else ends,
        tokenizer.bos_token_id,
        source,
        tokenizer.special_tokens,
    )
