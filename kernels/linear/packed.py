"""The linear layer, and what it is made of on this device and processor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from kernels import native, onednn, processor
from kernels.linear.cpu import NativeLinear
from kernels.linear.cuda import CudaLinear
from kernels.linear.in_parts import OneDnnLinear, PlainLinear

_PLAIN_COUNTS = (16, 1)


class _Layer(Protocol):
    """What `PackedLinear` says and does, done by one implementation."""

    @property
    def kind(self) -> str: ...

    @property
    def row_invariant(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


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
        self._run = _first_row_invariant(weight.detach(), None if bias is None else bias.detach(), float_output)

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


def _first_row_invariant(weight: Tensor, bias: Tensor | None, float_output: bool) -> _Layer:
    candidates = _candidates(weight, bias, float_output)
    first = next(candidates)
    return next((layer for layer in chain([first], candidates) if layer.row_invariant), first)


def _candidates(weight: Tensor, bias: Tensor | None, float_output: bool) -> Iterator[_Layer]:
    """What can run here, from the fastest to the one that treats all rows alike because it never sees two."""
    if weight.is_cuda:
        yield CudaLinear(weight, bias)
        return
    rounds = weight.dtype == torch.bfloat16 and not float_output
    if rounds and processor.has_bf16_arithmetic() and onednn.takes_bfloat16():
        yield OneDnnLinear(weight, bias)
    library = native.shared_object()
    if library is not None:
        yield NativeLinear(library, weight, bias)
    if onednn.available():
        yield OneDnnLinear(weight.float(), bias)
    for count in _PLAIN_COUNTS:
        yield PlainLinear(weight, bias, count)
