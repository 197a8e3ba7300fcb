"""What a model's files say before a tensor is read: whether it can be loaded, and how much memory it will take.

Without torch, in a fraction of a second, so that a start can refuse a model before anything has started. What only the
tensors themselves can tell is found when they are read (`opening.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.weights import gguf_config, hugging_face_config
from engine_actor.weights.config import ModelConfig
from engine_actor.weights.gguf_file import GgufFile
from engine_actor.weights.gguf_layouts import LAYOUTS
from engine_actor.weights.safetensors_files import open_weights, require_floats

# What the attention kernels can take.
_HEAD_MULTIPLE, _MAX_HEAD_SIZE = 8, 256
# Of a group in memory: its scale, and its minimum where there is one.
_GROUP_BYTES = 4


@dataclass(frozen=True, slots=True)
class Header:
    """matrices  number of elements of each, and the bytes of its exact stored form; None where it has none"""

    config: ModelConfig
    matrices: tuple[tuple[int, int | None], ...]

    def weight_bytes(self, element_bytes: int, *, as_stored: bool) -> int:
        """In memory, about. `element_bytes`: of what is expanded. `as_stored`: matrices that the file has in 4 or 8
        bits stay so."""
        total = sum(
            stored if as_stored and stored is not None else elements * element_bytes
            for elements, stored in self.matrices
        )
        config = self.config
        if config.tie_embeddings and not (as_stored and any(stored is not None for _, stored in self.matrices)):
            total += config.vocab_size * config.hidden_size * element_bytes  # the head is packed apart from the table
        return total


def read_header(path: Path) -> Header:
    """Of a Hugging Face folder or a GGUF file. Raises UnreadableModel for missing, truncated or corrupt files,
    UnsupportedModel for what Moorage cannot run."""
    header = _of_folder(path) if path.is_dir() else _of_gguf(path)
    require_head_size(str(path), header.config)
    return header


def require_head_size(path: str, config: ModelConfig) -> None:
    """Raises UnsupportedModel."""
    size = config.head_size
    if size % _HEAD_MULTIPLE or size > _MAX_HEAD_SIZE:
        raise UnsupportedModel(path, f"head size {size}: multiples of {_HEAD_MULTIPLE} up to {_MAX_HEAD_SIZE} can run")


def _of_folder(folder: Path) -> Header:
    config = hugging_face_config.read_config(folder)
    matrices = []
    for name, file in open_weights(folder, "numpy").items():
        tensor = file.get_slice(name)
        require_floats(str(folder), name, tensor.get_dtype())
        if len(shape := tensor.get_shape()) == 2:
            matrices.append((math.prod(shape), None))
    return Header(config, tuple(matrices))


def _of_gguf(path: Path) -> Header:
    if not path.is_file():
        raise UnreadableModel(str(path), "there is no such file or folder")
    file = GgufFile(path)
    config = gguf_config.read_config(file, ())
    for kind, name in {tensor.kind: name for name, tensor in file.tensors.items()}.items():
        _require_expandable(path, kind, name)
    return Header(
        config,
        tuple(
            (math.prod(tensor.shape), _stored_bytes(tensor.kind, math.prod(tensor.shape)))
            for tensor in file.tensors.values()
            if len(tensor.shape) == 2
        ),
    )


def _require_expandable(path: Path, kind: GGMLQuantizationType, name: str) -> None:
    if kind == GGMLQuantizationType.BF16:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedModel(str(path), f"tensor {name!r}: {error}") from error


def _stored_bytes(kind: GGMLQuantizationType, elements: int) -> int | None:
    layout = LAYOUTS.get(kind)
    return None if layout is None else elements * layout.bits // 8 + elements // layout.group * _GROUP_BYTES
