"""A model on disk: its configuration, and its tensors by one naming whatever the file format.

Names are those of Hugging Face's Llama and Gemma 3 checkpoints (`model.layers.0.self_attn.q_proj.weight`). Values
are those that the formulas use: a norm weight is what the normalised row is multiplied with, and the two halves of
a rotated head lie one after the other. Readers undo what a format stores differently.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch

from engine_actor.errors import UnsupportedModel
from engine_actor.weights.config import ModelConfig
from kernels.quantized_linear import QuantizedMatrix

# Elements of each tensor that the fingerprint looks at, about.
_SAMPLED = 4096
# Called with (tensors read so far, tensors in the checkpoint).
LoadProgress = Callable[[int, int], None]


class Checkpoint(ABC):
    """One opened model. Tensors are read when asked for, one at a time; nothing is kept."""

    def __init__(self, path: str, config: ModelConfig, progress: LoadProgress | None) -> None:
        self.path = path
        self.config = config
        self._progress = progress
        self._read: set[str] = set()
        self._digest = hashlib.sha256(repr(config).encode())

    @property
    def fingerprint(self) -> str:
        """Of the configuration and of all tensors that were read, in their order. It looks at some elements of each:
        training changes nearly all of them, and hashing every byte would slow a start down."""
        return self._digest.hexdigest()

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """The tensors that this checkpoint holds."""

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def _load_stored(self, name: str) -> QuantizedMatrix | None:
        return None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor on the CPU, contiguous, rounded to `dtype`.

        Raises UnsupportedModel when it is missing or has another shape, UnreadableModel when its bytes are damaged.
        """
        self._check(name, shape)
        value = self._load(name, dtype)
        self._note(name, f"{shape}", value)
        return value

    def stored(self, name: str, shape: tuple[int, int]) -> QuantizedMatrix | None:
        """The matrix as the file has it; None if that is no form of `QuantizedMatrix`. Raises as `tensor` does."""
        self._check(name, shape)
        matrix = self._load_stored(name)
        if matrix is not None:
            parts = [matrix.codes, matrix.scales] + ([] if matrix.minimums is None else [matrix.minimums])
            self._note(name, f"{shape} as stored, {matrix.form}", *parts)
        return matrix

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.names:
            raise UnsupportedModel(self.path, f"tensor {name!r} is missing")
        file_shape = self._shape(name)
        if file_shape != shape:
            raise UnsupportedModel(
                self.path, f"tensor {name!r} has shape {file_shape}, the configuration wants {shape}"
            )

    def _note(self, name: str, form: str, *parts: torch.Tensor) -> None:
        """Counts the tensor as read, and adds it to the fingerprint."""
        self._read.add(name)
        self._digest.update(f"{name} {form} ".encode())
        for part in parts:
            step = part.numel() // _SAMPLED | 1  # odd, so that it meets every column of a matrix
            self._digest.update(part.view(-1)[::step].float().numpy().tobytes())
        if self._progress is not None:
            self._progress(len(self._read), len(self.names))
