"""A matrix in 4 or 8 bits, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """w[n, k] = scales[n, k // group] * codes[n, k] + minimums[n, k // group], formed in float32.

    codes     int8 [N, K]. In 4 bits: 0 to 15 where there are minimums, else -8 to 7
    scales    float16 or float32 [N, K / group]
    minimums  as scales, or None
    bits      4 or 8
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.codes.dtype == torch.int8
        assert self.scales.dtype in (torch.float16, torch.float32)
        assert self.codes.shape[1] % self.scales.shape[1] == 0, (self.codes.shape, self.scales.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def form(self) -> tuple[int, int, int, bool]:
        """(group, bits, bytes of a scale, whether there are minimums): what two matrices must share to become one."""
        return self.group, self.bits, self.scales.element_size(), self.minimums is not None

    def expanded(self) -> Tensor:
        """The weights, float32 [N, K]."""
        weights = self.codes * self.scales.float().repeat_interleave(self.group, 1)
        return weights if self.minimums is None else weights + self.minimums.float().repeat_interleave(self.group, 1)

    def at(self, rows: Tensor) -> QuantizedMatrix:
        """The matrix of these rows, in this order."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return QuantizedMatrix(self.codes[rows], self.scales[rows], minimums, self.bits)


def joined(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """The rows of all, one after the other. They have one form."""
    assert len({matrix.form for matrix in matrices}) == 1
    minimums = [matrix.minimums for matrix in matrices if matrix.minimums is not None]
    return QuantizedMatrix(
        torch.cat([matrix.codes for matrix in matrices]),
        torch.cat([matrix.scales for matrix in matrices]),
        torch.cat(minimums) if minimums else None,
        matrices[0].bits,
    )
