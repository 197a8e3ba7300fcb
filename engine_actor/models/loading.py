"""Turning a checkpoint's tensors into the parts of a model, one at a time: no second copy of it is ever held."""

from __future__ import annotations

from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_actor.weights.checkpoint import Checkpoint
from kernels.linear import PackedLinear
from kernels.quantized_linear import QuantizedLinear, QuantizedMatrix, joined

Weight = Tensor | QuantizedMatrix


class Linear(Protocol):
    """x float32 [T, K] -> a new float32 [T, N]."""

    @property
    def row_invariant(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Embedding(Protocol):
    @property
    def nbytes(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens] -> float32 [tokens, hidden_size]. Raises IndexError for one beyond the vocabulary."""
        ...


class FloatEmbedding:
    """table: [vocab_size, hidden_size] of any float dtype."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.nbytes = table.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._table).float()


class SideBySide:
    """The outputs of several linears, one after the other: of weights whose forms differ no single one can be made."""

    def __init__(self, linears: list[Linear]) -> None:
        self._linears = linears

    @property
    def row_invariant(self) -> bool:
        return all(linear.row_invariant for linear in self._linears)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self._linears)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._linears], 1)


class Loader:
    """What every part needs in order to load itself.

    dtype      of expanded matrices, and what activations may be rounded to; norm weights and biases are float32
    device     where the parts live
    as_stored  matrices that the checkpoint holds in 4 or 8 bits stay so, where there is an exact form
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, as_stored: bool) -> None:
        self.config = checkpoint.config
        self.dtype, self.device, self.as_stored = dtype, device, as_stored
        self._checkpoint = checkpoint

    def vector(self, name: str, size: int) -> Tensor:
        return self._checkpoint.tensor(name, (size,)).to(self.device)

    def linear(self, prefix: str, modules: dict[str, int], columns: int, *, bias: bool = False) -> Linear:
        """One linear whose outputs are those of `modules` (name -> outputs), one after the other.

        Neighbours of one form become one product."""
        weights = [self._matrix(f"{prefix}{name}.weight", rows, columns) for name, rows in modules.items()]
        biases = [self.vector(f"{prefix}{name}.bias", rows) for name, rows in modules.items() if bias]
        linears: list[Linear] = []
        for _, neighbours in groupby(
            weights, lambda weight: weight.form if isinstance(weight, QuantizedMatrix) else None
        ):
            parts = list(neighbours)
            own_biases = [biases.pop(0) for _ in parts if biases]
            own_bias = torch.cat(own_biases) if own_biases else None
            quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
            if quantized:
                linears.append(QuantizedLinear(joined(quantized), own_bias, activations=self.dtype))
            else:
                linears.append(PackedLinear(torch.cat([part for part in parts if isinstance(part, Tensor)]), own_bias))
        return linears[0] if len(linears) == 1 else SideBySide(linears)

    def embedding_and_head(self, embedding: str, head: str | None) -> tuple[Embedding, Linear]:
        """From the tensor `embedding`, and from the tensor `head` or, where that is None, the same one."""
        shape = self.config.vocab_size, self.config.hidden_size
        table = self._matrix(embedding, *shape)
        if isinstance(table, QuantizedMatrix):
            # One packed copy serves both.
            packed = QuantizedLinear(table, activations=self.dtype)
            return packed, packed if head is None else self._logits(self._matrix(head, *shape))
        return FloatEmbedding(table), self._logits(table if head is None else self._matrix(head, *shape))

    def _logits(self, weight: Weight) -> Linear:
        if isinstance(weight, QuantizedMatrix):
            return QuantizedLinear(weight, activations=self.dtype)
        return PackedLinear(weight, float_output=True)

    def _matrix(self, name: str, rows: int, columns: int) -> Weight:
        stored = self._checkpoint.stored(name, (rows, columns)) if self.as_stored else None
        return self._checkpoint.tensor(name, (rows, columns), self.dtype).to(self.device) if stored is None else stored
