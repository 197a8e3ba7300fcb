"""A Hugging Face folder as a `Checkpoint`: config.json and one or several *.safetensors."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.weights.checkpoint import Checkpoint, Progress
from engine_actor.weights.hugging_face_config import read_config

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFaceCheckpoint(Checkpoint):
    def __init__(self, folder: Path, progress: Progress | None) -> None:
        super().__init__(str(folder), read_config(folder), progress)
        self._files: dict[str, Any] = {name: self._open(folder / name) for name in self._file_names(folder)}
        self._where = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def _file_names(self, folder: Path) -> list[str]:
        index = folder / _INDEX
        if not index.is_file():
            found = sorted(place.name for place in folder.glob("*.safetensors"))
            if not found:
                raise UnreadableModel(self.path, "there is no *.safetensors file in this folder")
            return found
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UnreadableModel(self.path, f"{_INDEX} is damaged: {error}") from error

    def _open(self, place: Path) -> Any:
        try:
            return safe_open(place, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise UnreadableModel(self.path, f"{place.name}: {error}") from error

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        kind = self._where[name].get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise UnsupportedModel(self.path, f"tensor {name!r} holds {kind}, not one of {', '.join(_FLOATS)}")
        value: torch.Tensor = self._where[name].get_tensor(name)
        if self.config.architecture == "gemma3" and name.endswith("norm.weight"):
            # These files hold the norm's weight minus one.
            value = value.float() + 1.0
        return value.to(dtype).contiguous()
