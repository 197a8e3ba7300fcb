"""The key-value header of a GGUF file, without its tensors.

The `gguf` library builds an array view for every string of the vocabulary, which takes seconds for a large
one; a front door wants only the header, so it is read here in one pass over the mapped file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.text.errors import TokenizerError

# Numbers by their GGUF type code, little endian.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")


def read_metadata(path: Path) -> dict[str, object]:
    """All keys of the header; arrays come as lists. Raises TokenizerError if this is not a GGUF file (version
    2 or 3).
    """
    with path.open("rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise TokenizerError(f"{path} is empty") from error
        with view:
            try:
                return _Header(view).read()
            except (struct.error, ValueError, UnicodeDecodeError, KeyError) as error:
                raise TokenizerError(f"{path} is not a readable GGUF file: {error}") from error


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> dict[str, object]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        (version,) = _TYPE.unpack_from(self._data, 4)
        if version not in (2, 3):
            raise ValueError(f"version {version}, wanted 2 or 3")
        (count,) = _LENGTH.unpack_from(self._data, 16)
        self._at = 24
        return {self._string(): self._value(self._type()) for _ in range(count)}

    def _type(self) -> int:
        (code,) = _TYPE.unpack_from(self._data, self._at)
        self._at += _TYPE.size
        return int(code)

    def _length(self) -> int:
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        self._at += _LENGTH.size
        return int(length)

    def _string(self) -> str:
        length = self._length()
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError("a string ends past the end of the file")
        return self._data[start : self._at].decode()

    def _numbers(self, code: int, count: int) -> list[object]:
        kind = _NUMBERS[code]
        start, self._at = self._at, self._at + count * kind.itemsize
        if self._at > len(self._data):
            raise ValueError("an array ends past the end of the file")
        values: list[object] = np.frombuffer(self._data[start : self._at], kind).tolist()
        return values

    def _value(self, code: int) -> object:
        if code == _STRING:
            return self._string()
        if code != _ARRAY:
            return self._numbers(code, 1)[0]
        inner, count = self._type(), self._length()
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(count)]
        return self._numbers(inner, count)
