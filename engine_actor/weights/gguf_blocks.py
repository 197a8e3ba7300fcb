"""GGUF blocks as numbers: expanded to float32, or as the codes, scales and minimums that they are made of.

The layouts of codes come from the `gguf` library: blocks whose scales are set to 1 and whose minimums are set to 0
expand to their codes.

What is exact: for every kind below, scale * code + minimum of a `QuantizedMatrix` is the float32 number that the
library expands to. The factors are so short that scale * code has at most 24 significant bits and is not rounded: 11
bits of a float16 times up to 7 of a code; in the K kinds 11 times 6 or 7 of a group's own scale, a product that float32
holds, times up to 5. What is left is the library's one rounding, that of adding the minimum.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize
from numpy.typing import NDArray

from engine_actor.weights.gguf_layouts import LAYOUTS, Bytes
from kernels.quantized_linear import QuantizedMatrix

# Elements expanded at once: the float32 intermediates of a block stay in the cache.
_CHUNK = 1 << 18
# The library expands 16 rows at a time; longer "rows" spare it most of its calls.
_LIBRARY_ROWS = 16


def expand(raw: Bytes, kind: GGMLQuantizationType) -> Iterator[NDArray[np.float32]]:
    """The values of consecutive blocks, in pieces. Blocks know nothing of rows.

    Raises NotImplementedError for a kind that the library cannot expand."""
    if kind == GGMLQuantizationType.BF16:
        # Exact, and a plain shift: the library would go through several copies.
        yield (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return
    for piece in _pieces(raw, kind):
        yield _floats(piece, kind)


def as_stored(raw: Bytes, kind: GGMLQuantizationType, rows: int, columns: int) -> QuantizedMatrix:
    """The blocks of a [rows, columns] matrix; kind: one of LAYOUTS."""
    layout = LAYOUTS[kind]
    codes = np.empty(rows * columns, np.int8)
    filled = 0
    for piece in _pieces(raw, kind):
        neutral = piece.reshape(-1, GGML_QUANT_SIZES[kind][1]).copy()
        for start, content in layout.neutral.items():
            neutral[:, start : start + len(content)] = content
        values = _floats(neutral.reshape(piece.shape), kind)
        codes[filled : filled + len(values)] = values
        filled += len(values)
    scales, minimums = _scales(raw.reshape(-1, GGML_QUANT_SIZES[kind][1]), kind)
    shape = rows, columns // layout.group
    return QuantizedMatrix(
        torch.from_numpy(codes).view(rows, columns),
        torch.from_numpy(scales).view(shape),
        None if minimums is None else torch.from_numpy(minimums).view(shape),
        layout.bits,
    )


def _scales(blocks: Bytes, kind: GGMLQuantizationType) -> tuple[NDArray[np.floating], NDArray[np.floating] | None]:
    """Scales and minimums of blocks [count, bytes]: [count, groups in a block], as float16 where that holds them."""
    if kind == GGMLQuantizationType.Q6_K:
        return _halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8), None
    scales, minimums = _halves(blocks, 0), _halves(blocks, 2)
    if kind in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K):
        factors, floors = Q4_K.get_scale_min(blocks[:, 4:16])
        return scales.astype(np.float32) * factors, -(minimums.astype(np.float32) * floors)
    return scales, minimums if 2 in LAYOUTS[kind].neutral else None


def _halves(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The float16 at this byte of each block: [count, 1], a copy."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _pieces(raw: Bytes, kind: GGMLQuantizationType) -> Iterator[Bytes]:
    """Consecutive blocks of about _CHUNK elements: [rows, bytes], as the library likes them."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = max(1, _CHUNK // block // _LIBRARY_ROWS) * block_bytes
    step = row_bytes * _LIBRARY_ROWS
    whole = len(raw) // step * step
    for start in range(0, whole, step):
        yield raw[start : start + step].reshape(_LIBRARY_ROWS, row_bytes)
    if whole < len(raw):
        yield raw[whole:].reshape(1, -1)


def _floats(blocks: Bytes, kind: GGMLQuantizationType) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(blocks, kind).astype(np.float32, copy=False).reshape(-1)
    return values if values.flags.writeable else values.copy()
