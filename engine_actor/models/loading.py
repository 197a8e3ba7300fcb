"""Turning a checkpoint's tensors into the parts of a model, one at a time: no second copy of it is ever held."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_actor.weights.checkpoint import Checkpoint
from kernels.linear import PackedLinear


class Loader:
    """What every part needs in order to load itself.

    dtype   of the matrices and of the KV cache; norm weights and biases are float32
    device  where the parts live
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.config = checkpoint.config
        self.dtype, self.device = dtype, device
        self._checkpoint = checkpoint

    def vector(self, name: str, size: int) -> Tensor:
        return self._checkpoint.tensor(name, (size,)).to(self.device)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._checkpoint.tensor(name, (rows, columns), self.dtype).to(self.device)

    def linear(self, prefix: str, modules: dict[str, int], columns: int, *, bias: bool = False) -> PackedLinear:
        """One linear whose outputs are those of `modules` (name -> outputs), one after the other."""
        weight = torch.cat([self.matrix(f"{prefix}{name}.weight", rows, columns) for name, rows in modules.items()])
        biases = [self.vector(f"{prefix}{name}.bias", rows) for name, rows in modules.items() if bias]
        return PackedLinear(weight, torch.cat(biases) if biases else None)
