"""A linear layer with packed weights whose rows do not depend on the batch they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import native, onednn, processor

# oneDNN keeps what it makes for each number of rows, half a megabyte and more a matrix, and never gives it all back: a
# server that sees every number grows by gigabytes. So it is asked for these alone, and for the last one repeatedly.
ROW_COUNTS = (
    *range(2, 17, 2), *range(20, 41, 4), *range(48, 81, 8), 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
)  # fmt: skip
# What the probe of row invariance takes of its batch: each of them, and some that are filled up.
_PROBE_COUNTS = (1, 3, 33, *ROW_COUNTS)
_PLAIN_COUNTS = (16, 1)
_probed: dict[tuple[object, ...], bool] = {}


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition: x @ weight.T + bias in float32, from weights of any float dtype."""
    return F.linear(x, weight.float(), None if bias is None else bias.float())


class PackedLinear:
    """y = x @ weight.T + bias, from its own copy of the weight.

    weight  bfloat16 or float32 [N, K]
    bias    [N] or None

    float_output  the results are compared with each other, as logits are: they must not be rounded to bfloat16

    On CPU the native product runs, except for bfloat16 weights on a processor with bfloat16 arithmetic: there oneDNN
    is faster for many rows and is taken if it passes a probe of row invariance. Where there is no native library it is
    the first of these that passes: oneDNN in bfloat16 as above, oneDNN in float32, F.linear in float32; there a
    bfloat16 weight takes twice its memory. On CUDA it is F.linear.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, float_output: bool = False) -> None:
        assert weight.dtype in (torch.bfloat16, torch.float32), weight.dtype
        self.out_features, self.in_features = weight.shape
        self._run = _choose(weight.detach(), None if bias is None else bias.detach(), float_output)

    @property
    def kind(self) -> str:
        """The implementation: "native-", "onednn-" or "torch-" with "bf16" or "fp32"; on CUDA "torch"."""
        return self._run.kind

    @property
    def row_invariant(self) -> bool:
        """A row's result is the same bits alone and in any batch.

        By construction for the native product; by a probe, once per shape and thread count, for oneDNN and torch.
        """
        return self._run.row_invariant

    @property
    def nbytes(self) -> int:
        """Of the packed weight and the bias."""
        return self._run.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [T, K] -> a new float32 [T, N]."""
        return self._run(x)


class _Native:
    """The C++ product of kernels/cpu/linear.cpp: each element one chain over k."""

    row_invariant = True

    def __init__(self, library: Any, weight: Tensor, bias: Tensor | None) -> None:
        bf16 = weight.dtype == torch.bfloat16
        self.kind = "native-bf16" if bf16 else "native-fp32"
        self._function = library.moorage_linear_bf16 if bf16 else library.moorage_linear_f32
        self._n, self._k = weight.shape
        weight = weight.contiguous()
        self._packed = torch.empty(library.moorage_linear_packed_size(self._n, self._k), dtype=weight.dtype)
        pack = library.moorage_linear_pack_bf16 if bf16 else library.moorage_linear_pack_f32
        pack(weight.data_ptr(), self._packed.data_ptr(), self._n, self._k, torch.get_num_threads())
        self._bias = None if bias is None else bias.float().contiguous()
        self.nbytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self._pointers = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.shape[1] == self._k, (x.dtype, x.shape)
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self._n)
        packed, bias = self._pointers
        self._function(x.data_ptr(), packed, bias, y.data_ptr(), rows, self._n, self._k, torch.get_num_threads())
        return y


class _InParts:
    """A product of a library, asked for the numbers of rows in `counts` alone: smaller parts are filled up.

    The weight's dtype is that of activations and results as well; the bias is added in float32.
    """

    kind: str
    counts: tuple[int, ...]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._shape, self._dtype = (weight.shape[0], weight.shape[1]), weight.dtype
        self._bias = None if bias is None else bias.float()
        self.nbytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype).contiguous()
        y = self._product(x).float() if len(x) in self.counts else self._by_parts(x)
        return y if self._bias is None else y + self._bias

    def _by_parts(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self._shape[0])
        for start in range(0, len(x), self.counts[-1]):
            part = x[start : start + self.counts[-1]]
            count = next(count for count in self.counts if count >= len(part))
            if len(part) == 1:
                padded = part.expand(count, -1).contiguous()  # faster than zeros, and decoding alone is nothing else
            else:
                padded = F.pad(part, (0, 0, 0, count - len(part)))
            y[start : start + len(part)] = self._product(padded)[: len(part)]
        return y

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def row_invariant(self) -> bool:
        key = (self.kind, self.counts, *self._shape, torch.get_num_threads())
        if key not in _probed:
            _probed[key] = rows_agree(self, self._shape[1])
        return _probed[key]


class _OneDnn(_InParts):
    """oneDNN with the weight in its own blocked layout; in bfloat16, activations and results are rounded to it."""

    counts = ROW_COUNTS

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.kind = "onednn-bf16" if weight.dtype == torch.bfloat16 else "onednn-fp32"
        self._packed = onednn.packed(weight)

    def _product(self, x: Tensor) -> Tensor:
        return onednn.product(x, self._packed)


class _Plain(_InParts):
    """F.linear in float32, `count` rows at a time: it is there wherever torch is."""

    kind = "torch-fp32"

    def __init__(self, weight: Tensor, bias: Tensor | None, count: int) -> None:
        wide = weight.to(torch.float32, copy=True)
        super().__init__(wide, bias)
        self._weight, self.counts = wide, (count,)

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


class _Cuda:
    """F.linear in the weight's dtype."""

    kind = "torch"
    row_invariant = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.clone()
        self._bias = None if bias is None else bias.to(weight.dtype).clone()
        self.nbytes = self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).float()


def _choose(weight: Tensor, bias: Tensor | None, float_output: bool) -> _Native | _InParts | _Cuda:
    if weight.is_cuda:
        return _Cuda(weight, bias)
    library = native.shared_object()
    rounded = (
        weight.dtype == torch.bfloat16
        and not float_output
        and processor.has_bf16_arithmetic()
        and onednn.takes_bfloat16()
    )
    if library is not None:
        if rounded:
            candidate = _OneDnn(weight, bias)
            if candidate.row_invariant:
                return candidate
        return _Native(library, weight, bias)
    candidates = _without_native(weight, bias, rounded)
    first = next(candidates)
    return next((layer for layer in chain([first], candidates) if layer.row_invariant), first)


def _without_native(weight: Tensor, bias: Tensor | None, rounded: bool) -> Iterator[_InParts]:
    """From the fastest to the one that treats all rows alike because it never sees two."""
    if rounded:
        yield _OneDnn(weight, bias)
    if onednn.available():
        yield _OneDnn(weight.float(), bias)
    for count in _PLAIN_COUNTS:
        yield _Plain(weight, bias, count)


def rows_agree(function: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether `function` gives rows of a random batch [T, width] the same bits when they come in smaller batches."""
    batch = torch.randn(max(_PROBE_COUNTS) + 1, width, generator=torch.Generator().manual_seed(0))
    whole = function(batch)
    return all(torch.equal(function(batch[-count:]), whole[-count:]) for count in _PROBE_COUNTS)
