"""Errors of the text layer."""

from __future__ import annotations


class TokenizerError(Exception):
    """A tokenizer cannot be loaded from these files; raised at start, never by a request."""


class ChatTemplateError(ValueError):
    """These messages cannot be rendered by the model's chat template, or the model has none. The client's to
    mend.
    """


class PromptTooLong(ValueError):
    """By its bytes alone this text can't be a prompt of fewer than `at_least` tokens, and `limit` is the most. The
    client's to mend.
    """

    def __init__(self, at_least: int, limit: int) -> None:
        super().__init__(f"at least {at_least} tokens, where {limit} are the most")
        self.at_least = at_least
        self.limit = limit
