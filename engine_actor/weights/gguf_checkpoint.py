"""A GGUF file as a `Checkpoint`: names mapped, blocks expanded, Llama's reordered heads put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine_actor.errors import UnsupportedModel
from engine_actor.weights.checkpoint import Checkpoint, Progress
from engine_actor.weights.gguf_config import read_config
from engine_actor.weights.gguf_file import GgufFile, GgufTensor

_ROPE_DIVISORS = "rope_freqs.weight"
_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FEED_FORWARD_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Elements expanded at once: the float32 intermediates of a block stay in the cache.
_CHUNK = 1 << 18
# The library expands 16 rows at a time; longer "rows" spare it most of its calls.
_LIBRARY_ROWS = 16


class GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._file = GgufFile(path)
        divisors: tuple[float, ...] = ()
        if _ROPE_DIVISORS in self._file.tensors:
            divisors = tuple(self._expanded(self._file.tensors[_ROPE_DIVISORS], _ROPE_DIVISORS).tolist())
        super().__init__(str(path), read_config(self._file, divisors), progress)
        # Converters reorder the rows of q and k for this architecture name only.
        self._reordered = self._file.fields["general.architecture"] == "llama"
        norms = _FEED_FORWARD_NORMS[self.config.architecture]
        self._stored = {_canonical(name, _LAYER | norms): name for name in self._file.tensors if name != _ROPE_DIVISORS}

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored[name]
        value = self._expanded(self._file.tensors[stored], stored, dtype)
        if self._reordered and ".q_proj." in name:
            return _halves_together(value, self.config.heads)
        if self._reordered and ".k_proj." in name:
            return _halves_together(value, self.config.kv_heads)
        return value

    def _expanded(self, tensor: GgufTensor, stored: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        flat = torch.empty(tensor.shape, dtype=dtype).view(-1)
        filled = 0
        try:
            for chunk in _expand(self._file.bytes_of(stored), tensor.kind):
                flat[filled : filled + len(chunk)] = torch.from_numpy(chunk)
                filled += len(chunk)
        except NotImplementedError as error:
            raise UnsupportedModel(self._file.path, f"tensor {stored!r}: {error}") from error
        return flat.view(tensor.shape)


def _expand(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> Iterator[NDArray[np.float32]]:
    """The values of consecutive blocks, in pieces of about _CHUNK elements. Blocks know nothing of rows."""
    if kind == GGMLQuantizationType.BF16:
        # Exact, and a plain shift: the library would go through several copies.
        yield (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = max(1, _CHUNK // block // _LIBRARY_ROWS) * block_bytes
    step = row_bytes * _LIBRARY_ROWS
    whole = len(raw) // step * step
    for start in range(0, whole, step):
        yield _floats(raw[start : start + step].reshape(_LIBRARY_ROWS, row_bytes), kind)
    if whole < len(raw):
        yield _floats(raw[whole:].reshape(1, -1), kind)


def _floats(blocks: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(blocks, kind).astype(np.float32, copy=False).reshape(-1)
    return values if values.flags.writeable else values.copy()


def _canonical(stored: str, layer_names: dict[str, str]) -> str:
    """The canonical name; a name that no model asks for stays as it is."""
    if stored.startswith("blk.") and stored.count(".") == 3:
        _, layer, module, kind = stored.split(".")
        return f"model.layers.{layer}.{layer_names.get(module, module)}.{kind}"
    module, _, kind = stored.rpartition(".")
    return f"{_WHOLE_MODEL.get(module, module)}.{kind}"


def _halves_together(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair 0 first, pair 0 second, pair 1 first, ...) to all first halves, then all second.

    value: [heads * head_size, ...]
    """
    pairs = value.view(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
