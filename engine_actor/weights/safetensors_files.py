"""The *.safetensors of a Hugging Face folder: which there are, opened and checked. Without torch, unless it is asked
for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from engine_actor.errors import UnreadableModel, UnsupportedModel

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


def open_weights(folder: Path, framework: Literal["pt", "numpy"]) -> dict[str, Any]:
    """Tensor name to the open file that has it, whose tensors are then torch's or numpy's. Raises UnreadableModel."""
    where: dict[str, Any] = {}
    for name in _file_names(folder):
        try:
            file: Any = safe_open(folder / name, framework=framework, device="cpu")
        except (OSError, SafetensorError) as error:
            raise UnreadableModel(str(folder), f"{name}: {error}") from error
        where |= dict.fromkeys(file.keys(), file)
    return where


def require_floats(folder: str, name: str, kind: str) -> None:
    """Raises UnsupportedModel."""
    if kind not in _FLOATS:
        raise UnsupportedModel(folder, f"tensor {name!r} holds {kind}, not one of {', '.join(_FLOATS)}")


def _file_names(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.is_file():
        names = sorted(place.name for place in folder.glob("*.safetensors"))
        if not names:
            raise UnreadableModel(str(folder), "there is no *.safetensors file in this folder")
        return names
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableModel(str(folder), f"{_INDEX} is damaged: {error}") from error
