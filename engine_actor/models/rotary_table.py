"""Cosines and sines of every position, computed once.

A table, not a computation per step: vectorised cosines may differ in the last bit between the body and the tail of an
array, and then a token would depend on its place in the batch. In float64 and rounded, the table is the same for any
length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_actor.weights.config import RopeConfig


class RotaryTable:
    """cos, sin: float32 [length, head_size / 2]."""

    def __init__(self, rope: RopeConfig, head_size: int, length: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequencies = 1.0 / rope.theta**exponents
        if rope.divisors:
            frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
        # Angles are rounded to float32 first: that is what the models were trained with.
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).double()
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: int64 [tokens] -> cos, sin: float32 [tokens, head_size / 2]."""
        return self.cos.index_select(0, position_ids), self.sin.index_select(0, position_ids)
