"""A linear layer with packed weights whose rows do not depend on the batch they are in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition: x @ weight.T + bias in float32, from weights of any float dtype."""
    return F.linear(x, weight.float(), None if bias is None else bias.float())


class PackedLinear:
    """y = x @ weight.T + bias, from its own copy of the weight in the weight's dtype.

    weight  bfloat16 or float32 [N, K]
    bias    [N] or None
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.detach().clone()
        self._bias = None if bias is None else bias.detach().to(weight.dtype).clone()

    @property
    def kind(self) -> str:
        """The implementation: "native-bf16", "native-fp32", "onednn-bf16", "onednn-fp32" or "torch"."""
        return "torch"

    @property
    def row_invariant(self) -> bool:
        """A row's result is the same bits alone and in any batch."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [T, K] -> float32 [T, N]."""
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).float()
