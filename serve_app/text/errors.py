"""Errors of the text layer."""

from __future__ import annotations


class TokenizerError(Exception):
    """A tokenizer cannot be loaded from these files; raised at start, never by a request."""


class ChatTemplateError(ValueError):
    """These messages cannot be rendered by the model's chat template, or the model has none. The client's to
    mend.
    """
