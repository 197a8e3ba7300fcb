"""A GGUF file as a `Checkpoint`: names mapped, Llama's reordered heads put back."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from engine_actor.errors import UnsupportedModel
from engine_actor.weights.checkpoint import Checkpoint, LoadProgress
from engine_actor.weights.gguf_blocks import as_stored, expand
from engine_actor.weights.gguf_config import read_config
from engine_actor.weights.gguf_file import GgufFile, GgufTensor
from engine_actor.weights.gguf_layouts import LAYOUTS
from kernels.quantized_linear import QuantizedMatrix

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


class GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path, progress: LoadProgress | None) -> None:
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
        order = self._order(name, value.shape[0])
        return value if order is None else value[order]

    def _load_stored(self, name: str) -> QuantizedMatrix | None:
        stored = self._stored[name]
        tensor = self._file.tensors[stored]
        if tensor.kind not in LAYOUTS or len(tensor.shape) != 2:
            return None
        matrix = as_stored(self._file.bytes_of(stored), tensor.kind, *tensor.shape)
        order = self._order(name, tensor.shape[0])
        return matrix if order is None else matrix.at(order)

    def _order(self, name: str, rows: int) -> torch.Tensor | None:
        """Which stored row is the first, the second and so on; None: they lie in order."""
        if self._reordered and ".q_proj." in name:
            return _halves_together(rows, self.config.heads)
        if self._reordered and ".k_proj." in name:
            return _halves_together(rows, self.config.kv_heads)
        return None

    def _expanded(self, tensor: GgufTensor, stored: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        flat = torch.empty(tensor.shape, dtype=dtype).view(-1)
        filled = 0
        try:
            for chunk in expand(self._file.bytes_of(stored), tensor.kind):
                flat[filled : filled + len(chunk)] = torch.from_numpy(chunk)
                filled += len(chunk)
        except NotImplementedError as error:
            raise UnsupportedModel(self._file.path, f"tensor {stored!r}: {error}") from error
        return flat.view(tensor.shape)


def _canonical(stored: str, layer_names: dict[str, str]) -> str:
    """The canonical name; a name that no model asks for stays as it is."""
    if stored.startswith("blk.") and stored.count(".") == 3:
        _, layer, module, kind = stored.split(".")
        return f"model.layers.{layer}.{layer_names.get(module, module)}.{kind}"
    module, _, kind = stored.rpartition(".")
    return f"{_WHOLE_MODEL.get(module, module)}.{kind}"


def _halves_together(rows: int, heads: int) -> torch.Tensor:
    """Rows of each head from (pair 0 first, pair 0 second, pair 1 first, ...) to all first halves, then all second."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
