"""A GGUF file (version 2 or 3): its key-value header and where its tensors lie.

Read in one pass over the mapped file. The reader of the `gguf` library builds an array view for every string of the
vocabulary, which takes 5 to 20 seconds on the demo models; block formats still come from that library.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from engine_actor.errors import UnreadableModel, UnsupportedModel

_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
# More dimensions than ggml has; a larger number in the file is damage, not a tensor.
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: as in torch, outermost first. [start, start + nbytes): its bytes in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """fields: the header, with arrays as lists. tensors: by their name in the file.

    Raises UnreadableModel if this is no GGUF file or a damaged one, UnsupportedModel for an unknown block format.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UnreadableModel(self.path, str(error)) from error
        self._at = 0
        self.fields: dict[str, object] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise UnreadableModel(self.path, f"the GGUF header is damaged near byte {self._at}") from error

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """A read-only view of the tensor's bytes in the mapped file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.start)

    def _read(self) -> None:
        if self._data[:4] != b"GGUF":
            raise UnreadableModel(self.path, "this is not a GGUF file: it does not start with 'GGUF'")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise UnsupportedModel(self.path, f"GGUF version {version}; versions 2 and 3 can be read")
        tensor_count, field_count = self._number("Q"), self._number("Q")
        for _ in range(int(field_count)):
            name = self._string()
            self.fields[name] = self._value(int(self._number("I")))
        infos = [self._tensor_info() for _ in range(int(tensor_count))]
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise UnreadableModel(self.path, f"general.alignment must be a positive number, not {alignment!r}")
        base = -(-self._at // alignment) * alignment
        for name, code, shape, offset in infos:
            self.tensors[name] = self._place(name, code, shape, base + offset)

    def _place(self, name: str, code: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise UnsupportedModel(self.path, f"tensor {name!r} has the unknown block format {code}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise UnreadableModel(self.path, f"tensor {name!r}: rows of {shape[-1]} are not whole {kind.name} blocks")
        nbytes = math.prod(shape) // block * block_bytes
        if start + nbytes > len(self._data):
            raise UnreadableModel(
                self.path,
                f"the file is truncated: tensor {name!r} ends at byte {start + nbytes}, the file at {len(self._data)}",
            )
        return GgufTensor(kind, shape, start, nbytes)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dimensions = int(self._number("I"))
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise UnreadableModel(self.path, f"tensor {name!r} has {dimensions} dimensions: the header is damaged")
        innermost_first = [int(self._number("Q")) for _ in range(dimensions)]
        return name, int(self._number("I")), tuple(reversed(innermost_first)), int(self._number("Q"))

    def _number(self, form: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return value

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        start = self._at + _LENGTH.size
        self._at = start + length
        if self._at > len(self._data):
            raise struct.error("a string ends past the end of the file")
        return self._data[start : self._at].decode()

    def _value(self, code: int) -> object:
        if code == _STRING:
            return self._string()
        if code != _ARRAY:
            return self._number(_NUMBER_FORMATS[code])
        inner, count = int(self._number("I")), int(self._number("Q"))
        if count > len(self._data) - self._at:  # every element takes a byte at least
            raise struct.error("an array ends past the end of the file")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_NUMBER_FORMATS[inner]}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{_NUMBER_FORMATS[inner]}")
        return list(values)
