"""A header's bytes as text: UTF-8, as most clients send it, else latin-1, as HTTP once was and some libraries are."""

from __future__ import annotations


def header_text(raw: bytes) -> str:
    """Every sequence of bytes is some text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
