"""Products of torch's libraries, which promise nothing about rows: asked for few numbers of rows, and probed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import onednn

# oneDNN keeps what it makes for each number of rows, half a megabyte and more a matrix, and never gives it all back: a
# server that sees every number grows by gigabytes. So it is asked for these alone, and for the last one repeatedly.
ROW_COUNTS = (
    *range(2, 17, 2), *range(20, 41, 4), *range(48, 81, 8), 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
)  # fmt: skip
# What the probe of row invariance takes of its batch: each of them, and some that are filled up.
_PROBE_COUNTS = (1, 3, 33, *ROW_COUNTS)
_probed: dict[tuple[object, ...], bool] = {}


class InParts:
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


class OneDnnLinear(InParts):
    """oneDNN with the weight in its own blocked layout; in bfloat16, activations and results are rounded to it."""

    counts = ROW_COUNTS

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.kind = "onednn-bf16" if weight.dtype == torch.bfloat16 else "onednn-fp32"
        self._packed = onednn.packed(weight)

    def _product(self, x: Tensor) -> Tensor:
        return onednn.product(x, self._packed)


class PlainLinear(InParts):
    """F.linear in float32, `count` rows at a time: it is there wherever torch is."""

    kind = "torch-fp32"

    def __init__(self, weight: Tensor, bias: Tensor | None, count: int) -> None:
        wide = weight.to(torch.float32, copy=True)
        super().__init__(wide, bias)
        self._weight, self.counts = wide, (count,)

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


def rows_agree(function: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether `function` gives rows of a random batch [T, width] the same bits when they come in smaller batches."""
    batch = torch.randn(max(_PROBE_COUNTS) + 1, width, generator=torch.Generator().manual_seed(0))
    whole = function(batch)
    return all(torch.equal(function(batch[-count:]), whole[-count:]) for count in _PROBE_COUNTS)
