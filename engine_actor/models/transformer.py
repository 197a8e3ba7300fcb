"""A whole decoder-only model over packed tokens: embedding, layers, output projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from engine_actor.models.attention import Attention
from engine_actor.models.gemma3 import Gemma3Layer
from engine_actor.models.llama import LlamaLayer
from engine_actor.models.loading import Embedding, Linear, Loader
from engine_actor.models.mlp import Mlp
from engine_actor.models.step_tensors import StepTensors
from engine_actor.weights.checkpoint import Checkpoint
from kernels.norm import rms_norm


class Layer(Protocol):
    attention: Attention
    mlp: Mlp

    def __call__(self, x: Tensor, step: StepTensors) -> Tensor: ...


_LAYERS: dict[str, Callable[[Loader, int], Layer]] = {"llama": LlamaLayer, "gemma3": Gemma3Layer}


class Transformer:
    """The residual stream is float32. Arguments as for `Loader`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, as_stored: bool) -> None:
        config = self.config = checkpoint.config
        loader = Loader(checkpoint, dtype, device, as_stored)
        head = None if config.tie_embeddings else "lm_head.weight"
        self.embedding, self.head = loader.embedding_and_head("model.embed_tokens.weight", head)
        build = _LAYERS[config.architecture]
        self.layers = [build(loader, layer) for layer in range(config.layers)]
        self.norm = loader.vector("model.norm.weight", config.hidden_size)
        self.fingerprint = checkpoint.fingerprint

    @property
    def weight_bytes(self) -> int:
        """Of all matrices; what else a model holds is small."""
        parts: set[Linear | Embedding] = {self.embedding, *self.linears()}
        return sum(part.nbytes for part in parts)

    def linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (
                layer.attention.query_key_value,
                layer.attention.output,
                layer.mlp.gate_up,
                layer.mlp.down,
            )
        yield self.head

    def __call__(self, step: StepTensors) -> Tensor:
        """Logits, float32 [wanted, vocab_size], of the rows that the step wants."""
        x = self.embedding.rows(step.input_ids)
        if self.config.embedding_scale != 1.0:
            x *= self.config.embedding_scale
        for layer in self.layers:
            x = layer(x, step)
        if step.logits_rows is not None:
            x = x.index_select(0, step.logits_rows)
        if x.shape[0] == 0:
            return x.new_empty(0, self.config.vocab_size)
        return self.head(rms_norm(x, self.norm, self.config.rms_eps))
