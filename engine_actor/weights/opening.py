"""Which kind of checkpoint a path is."""

from __future__ import annotations

from pathlib import Path

from engine_actor.errors import UnreadableModel
from engine_actor.weights.checkpoint import Checkpoint, LoadProgress
from engine_actor.weights.gguf_checkpoint import GgufCheckpoint
from engine_actor.weights.hugging_face import HuggingFaceCheckpoint


def open_checkpoint(path: str | Path, progress: LoadProgress | None = None) -> Checkpoint:
    """Opens a Hugging Face folder (config.json and *.safetensors) or a GGUF file.

    Raises UnreadableModel for missing, truncated or corrupt files, UnsupportedModel for what Moorage cannot run.
    """
    place = Path(path)
    if place.is_dir():
        return HuggingFaceCheckpoint(place, progress)
    if place.is_file():
        return GgufCheckpoint(place, progress)
    raise UnreadableModel(str(path), "there is no such file or folder")
