"""The C++ products of quantized_linear.cpp and quantized_dots.cpp, and the packing that both read."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import native
from kernels.quantized_linear.matrix import QuantizedMatrix

_FORM = [c_int64] + [c_int] * 3  # group, bits, bytes of a scale, whether there are minimums
_PRODUCT = [c_void_p] * 4 + [c_int64] * 3 + _FORM + [c_int]
_PACK = [c_void_p] * 4 + [c_int64] * 2 + _FORM + [c_int]
_ROWS = [c_void_p] * 3 + [c_int64] * 2 + _FORM + [c_int]
_SIZE = [c_int64] * 2 + _FORM


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
        library = native.shared_object()
        assert library is not None, native.status()
        self.out_features, self.in_features = weight.shape
        rounds = activations == torch.bfloat16 and native.function(library, "moorage_has_bf16_dots", [], c_int)()
        self.kind = f"native-q{weight.bits}" + ("-bf16" if rounds else "")
        product = "moorage_quantized_dots" if rounds else "moorage_quantized_linear"
        self._product = native.function(library, product, _PRODUCT)
        self._rows = native.function(library, "moorage_quantized_rows", _ROWS)
        self._form = weight.form
        size = native.function(library, "moorage_quantized_packed_size", _SIZE, c_int64)(*weight.shape, *self._form)
        assert size, self._form
        self._packed = torch.empty(size, dtype=torch.uint8)
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        minimums = None if weight.minimums is None else weight.minimums.to(scales.dtype).contiguous()
        native.function(library, "moorage_quantized_pack", _PACK)(
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
        self._rows(
            self._pointers[0],
            ids.data_ptr(),
            out.data_ptr(),
            len(ids),
            self.in_features,
            *self._form,
            torch.get_num_threads(),
        )
        return out
