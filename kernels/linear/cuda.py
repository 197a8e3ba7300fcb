"""The product on CUDA: torch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class CudaLinear:
    """F.linear in the weight's dtype."""

    kind = "torch"
    row_invariant = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.clone()
        self._bias = None if bias is None else bias.to(weight.dtype).clone()
        self.nbytes = self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).float()
