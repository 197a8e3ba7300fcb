"""A request's cache as it travels between engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """What a request's blocks hold, as plain data that pickles without a copy (protocol 5).

    fingerprint  of the cache that they come from; they are of use in one of the same fingerprint only
    positions    that are valid: the first ones of the sequence. The last block may be filled in part
    content      [parts, blocks, ...], as `Decoder.read_blocks` gives it
    """

    fingerprint: str
    positions: int
    content: NDArray[Any]
