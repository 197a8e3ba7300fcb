"""Which memory layouts the native operations read."""

from __future__ import annotations

from torch import Tensor


def is_dense_rows(x: Tensor) -> bool:
    """Everything behind the first dimension is dense: rows may lie apart, as in a slice of a wider projection."""
    stride = x.stride()
    if stride[-1] != 1:
        return False
    return x.dim() == 2 or x.shape[1] == 1 or stride[1] == x.shape[2]


def dense_rows(x: Tensor) -> Tensor:
    """x [T, H] or [T, n, D] as it is where its rows are dense, else a dense copy."""
    return x if is_dense_rows(x) else x.contiguous()
