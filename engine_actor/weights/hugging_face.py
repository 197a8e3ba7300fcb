"""A Hugging Face folder as a `Checkpoint`: config.json and one or several *.safetensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from engine_actor.weights.checkpoint import Checkpoint, LoadProgress
from engine_actor.weights.hugging_face_config import read_config
from engine_actor.weights.safetensors_files import open_weights, require_floats


class HuggingFaceCheckpoint(Checkpoint):
    def __init__(self, folder: Path, progress: LoadProgress | None) -> None:
        super().__init__(str(folder), read_config(folder), progress)
        self._where = open_weights(folder, "pt")

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        kind = self._where[name].get_slice(name).get_dtype()
        require_floats(self.path, name, kind)
        value: torch.Tensor = self._where[name].get_tensor(name)
        if self.config.architecture == "gemma3" and name.endswith("norm.weight"):
            # These files hold the norm's weight minus one.
            value = value.float() + 1.0
        return value.to(dtype).contiguous()
