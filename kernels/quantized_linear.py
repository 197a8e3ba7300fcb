"""A linear layer whose weight stays in 4 or 8 bits, and the rows of such a weight as embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native


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


def quantized_linear_reference(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """The definition: x @ weight.T + bias in float32."""
    return F.linear(x, weight.expanded(), bias)


class QuantizedLinear:
    """y = x @ weight.T + bias on the CPU, from its own packed copy of the quantized weight.

    activations  float32: where scale * code is exact, as it is for all that the common file formats hold, the result
                 has the bits of a `PackedLinear` of float32 weights. bfloat16: on a processor that multiplies it, x is
                 rounded to it (the weight is not), which is faster; on others this is float32

    It needs the native library.
    """

    row_invariant = True

    def __init__(
        self, weight: QuantizedMatrix, bias: Tensor | None = None, *, activations: torch.dtype = torch.float32
    ) -> None:
        self._library: Any = native.shared_object()
        assert self._library is not None, native.status()
        self.out_features, self.in_features = weight.shape
        rounds = activations == torch.bfloat16 and self._library.moorage_has_bf16_dots()
        self.kind = f"native-q{weight.bits}" + ("-bf16" if rounds else "")
        self._product = self._library.moorage_quantized_dots if rounds else self._library.moorage_quantized_linear
        self._form = weight.form
        size = self._library.moorage_quantized_packed_size(*weight.shape, *self._form)
        assert size, self._form
        self._packed = torch.empty(size, dtype=torch.uint8)
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        minimums = None if weight.minimums is None else weight.minimums.to(scales.dtype).contiguous()
        self._library.moorage_quantized_pack(
            codes.data_ptr(),
            scales.data_ptr(),
            None if minimums is None else minimums.data_ptr(),
            self._packed.data_ptr(),
            *weight.shape,
            *self._form,
            torch.get_num_threads(),
        )
        self._bias = None if bias is None else bias.float().contiguous()
        self._pointers = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    @property
    def nbytes(self) -> int:
        """Of the packed weight and the bias."""
        return self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [T, K] -> a new float32 [T, N]."""
        assert x.dtype == torch.float32 and x.shape[1] == self.in_features, (x.dtype, x.shape)
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features)
        self._product(
            x.data_ptr(),
            *self._pointers,
            y.data_ptr(),
            rows,
            self.out_features,
            self.in_features,
            *self._form,
            torch.get_num_threads(),
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, float32 [len(ids), K]; ids int64. Raises IndexError for one that the weight lacks."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"index out of range: the weight has {self.out_features} rows")
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.in_features)
        self._library.moorage_quantized_rows(
            self._pointers[0],
            ids.data_ptr(),
            out.data_ptr(),
            len(ids),
            self.in_features,
            *self._form,
            torch.get_num_threads(),
        )
        return out
