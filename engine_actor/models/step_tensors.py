"""What all layers of a model share in one step, on its device and computed once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Shapes and meanings as in `PackedStep`, plus what the layers derive from it.

    slots         int64 [tokens]: block * block_size + offset in the block, where each token's key and value go
    rotary        cos, sin: float32 [tokens, head_size / 2], for layers that see the whole sequence
    local_rotary  the same for layers with a window
    logits_rows   int64 [wanted], or None when it is every token in order
    """

    input_ids: Tensor
    slots: Tensor
    block_table: Tensor
    cumulative: Tensor
    past: Tensor
    rotary: tuple[Tensor, Tensor]
    local_rotary: tuple[Tensor, Tensor]
    logits_rows: Tensor | None
