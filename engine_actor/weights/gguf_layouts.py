"""The block formats of GGUF files that have an exact stored form: bits, groups, and where their scales lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
_ZERO = np.zeros(2, np.uint8)
# Twelve bytes that hold eight scales of 1 and eight minimums of 0 in six bits each.
_K_ONES = np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the scales of a block lie: first byte -> the bytes that make them 1, or the minimums 0."""

    bits: int
    group: int
    neutral: dict[int, Bytes]


LAYOUTS = {
    GGMLQuantizationType.Q4_0: Layout(4, 32, {0: _ONE}),
    GGMLQuantizationType.Q4_1: Layout(4, 32, {0: _ONE, 2: _ZERO}),
    GGMLQuantizationType.Q5_0: Layout(8, 32, {0: _ONE}),
    GGMLQuantizationType.Q5_1: Layout(8, 32, {0: _ONE, 2: _ZERO}),
    GGMLQuantizationType.Q8_0: Layout(8, 32, {0: _ONE}),
    GGMLQuantizationType.Q4_K: Layout(4, 32, {0: _ONE, 2: _ZERO, 4: _K_ONES}),
    GGMLQuantizationType.Q5_K: Layout(8, 32, {0: _ONE, 2: _ZERO, 4: _K_ONES}),
    GGMLQuantizationType.Q6_K: Layout(8, 16, {192: np.ones(16, np.uint8), 208: _ONE}),
}
