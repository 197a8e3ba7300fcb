"""No key of a JSON object comes twice.

A grammar can't say so of names that it does not list: it would have to remember all that came. So a cursor reads along,
and takes those tokens out of its mask that would end a key which the object has already. For that each name must have
one spelling: in a key only what has to be escaped is, and always in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine_actor.sampling.sample_row import Bits

_QUOTE, _BACKSLASH = b'"\\'
_SHORT = b'"\\bfnrt'
_CONTROLS = frozenset(b"\\u%04x" % code for code in range(32) if code not in b"\b\f\n\r\t")
_BEGUN_CONTROLS = frozenset(control[:length] for control in _CONTROLS for length in range(2, 6))


class KeyTokens:
    """The tokens of a vocabulary that can end a key, or spell one in another way.

    outside    where no string is open
    in_value   in a string that is no key
    in_key     in a key; those that only end it are in `ending`
    in_escape  in a key, where an escape has begun
    ending     by what they have before their first quote
    """

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int]) -> None:
        texts = [(i, text) for i, text in enumerate(tokens) if text and i not in special]
        self.tokens = tokens
        counted = [(i, text.count(b'"'), b"\\" in text) for i, text in texts]
        self.outside = _ids([i for i, quotes, escapes in counted if quotes + escapes > 1])
        self.in_value = _ids([i for i, quotes, escapes in counted if quotes > 1 and quotes + escapes > 2])
        self.in_key = _ids([i for i, quotes, escapes in counted if quotes > 2 or escapes])
        self.in_escape = _ids([i for i, _ in texts])
        self.ending: dict[bytes, list[int]] = {}
        for i, text in texts:
            head, quote, _ = text.partition(b'"')
            if quote:
                self.ending.setdefault(head, []).append(i)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands in JSON.

    objects   of what is open, outermost first: the keys so far; None for a list
    string    what is open of a string, as it is written; None: none is
    is_key    that string is a key
    awaits    the next string is one
    escape    what is begun of an escape in it
    """

    objects: tuple[frozenset[bytes] | None, ...] = ()
    string: bytes | None = None
    is_key: bool = False
    awaits: bool = False
    escape: bytes = b""

    def after(self, text: bytes) -> _Place | None:
        """None: a key came again, or is not spelled as it has to be."""
        place: _Place | None = self
        for byte in text:
            if place is None:
                return None
            place = place._in_string(byte) if place.string is not None else place._outside(byte)
        return place

    def _outside(self, byte: int) -> _Place:
        if byte == _QUOTE:
            return replace(self, string=b"", is_key=self.awaits)
        if byte in b"{[":
            return _Place((*self.objects, frozenset() if byte == b"{"[0] else None), awaits=byte == b"{"[0])
        if byte in b"}]":
            return _Place(self.objects[:-1])
        if byte == b","[0]:
            return replace(self, awaits=bool(self.objects) and self.objects[-1] is not None)
        return self

    def _in_string(self, byte: int) -> _Place | None:
        assert self.string is not None
        if self.escape:
            return self._in_escape(bytes((byte,)))
        if byte == _BACKSLASH:
            return replace(self, escape=b"\\")
        if byte != _QUOTE:
            return replace(self, string=self.string + bytes((byte,))) if self.is_key else self
        if not self.is_key:
            return replace(self, string=None)
        keys = self.objects[-1]
        assert keys is not None
        return None if self.string in keys else _Place((*self.objects[:-1], keys | {self.string}))

    def _in_escape(self, byte: bytes) -> _Place | None:
        assert self.string is not None
        escape = self.escape + byte
        if not self.is_key:  # any may come, and only the letter after a backslash is no end of the string
            return replace(self, escape=b"")
        if (len(escape) == 2 and byte in _SHORT) or escape in _CONTROLS:
            return replace(self, string=self.string + escape, escape=b"")
        return replace(self, escape=escape) if escape in _BEGUN_CONTROLS else None


class KeyWatch:
    """What one answer has of keys."""

    def __init__(self, tokens: KeyTokens) -> None:
        self._tokens = tokens
        self._place: _Place | None = _Place()  # None: it is no such answer, as where another engine began it

    def read(self, text: bytes) -> None:
        if self._place is not None:
            self._place = self._place.after(text)

    def restrict(self, allowed: Bits) -> None:
        """Takes out of a mask what can't come."""
        place = self._place
        if place is None:
            return
        suspects = self._suspects(place)
        for token in suspects[(allowed[suspects >> 3] >> (suspects & 7)) & 1 == 1].tolist():
            if place.after(self._tokens.tokens[token]) is None:
                _forbid(allowed, token)
        if place.is_key and place.string is not None and not place.escape:
            for key in place.objects[-1] or ():
                if key.startswith(place.string):
                    for token in self._tokens.ending.get(key[len(place.string) :], ()):
                        _forbid(allowed, token)

    def _suspects(self, place: _Place) -> NDArray[np.int64]:
        if place.string is None:
            return self._tokens.outside
        if not place.is_key:
            return self._tokens.in_value
        return self._tokens.in_escape if place.escape else self._tokens.in_key


def _forbid(allowed: Bits, token: int) -> None:
    allowed[token >> 3] &= 0xFF ^ (1 << (token & 7))


def _ids(tokens: list[int]) -> NDArray[np.int64]:
    return np.array(tokens, np.int64)
