"""Rotary position embedding, rotate-half (NeoX) layout, in place."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import ByDevice
from kernels.rotary import cpu
from kernels.rotary.reference import apply_rotary_reference

__all__ = ["apply_rotary", "apply_rotary_reference"]

_APPLY_ROTARY = ByDevice[cpu.ApplyRotary](apply_rotary_reference, cpu.bind)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns every head of every token by its position. **In place**; returns x.

    x    float32 [T, n, D]; tokens may lie apart (a slice of a wider projection), heads are dense
    cos  float32 [T, D/2], the rows of the tokens' positions
    sin  float32 [T, D/2]
    """
    return _APPLY_ROTARY[x.is_cuda](x, cos, sin)
