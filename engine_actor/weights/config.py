"""What a model is made of, in one vocabulary for every file format and family."""

from __future__ import annotations

from dataclasses import dataclass

from engine_actor.manifest import PagedState


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: pair i turns by `position * theta ** (-2 i / head_size) / divisors[i]` radians.

    divisors  one number per pair (head_size / 2), or empty for no scaling; the "linear" and "llama3" scalings are both
              of this form
    """

    theta: float
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    architecture     "llama" (also SmolLM2, Mistral, Qwen2, Qwen3) or "gemma3": which module runs it
    layers           number of layers
    head_size        columns of one head; heads * head_size need not be hidden_size
    context_length   longest sequence that the positions allow
    rope             of the layers that see the whole sequence
    local_rope       of the layers with a window
    windows          one number per layer: keys that a query sees, itself included; 0: all of them
    qkv_bias         biases on the query, key and value projections; output_bias: on the attention output projection
    qk_norm          RMS norm of every query and key head before the rotation
    tie_embeddings   the output projection is the embedding table
    activation       of the MLP's gate: "silu" or "gelu_tanh"
    embedding_scale  what embeddings are multiplied with
    query_scale      what attention scores are multiplied with
    eos_token_ids    tokens that end a turn
    """

    architecture: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope: RopeConfig
    local_rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    activation: str
    embedding_scale: float
    query_scale: float
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "intermediate_size", "vocab_size")
        for name in (*sizes, "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, not {self.heads} of {self.kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size must be even, not {self.head_size}")
        if len(self.windows) != self.layers or min(self.windows) < 0:
            raise ValueError(f"windows must be {self.layers} numbers >= 0, not {self.windows}")
        for rope in (self.rope, self.local_rope):
            if rope.theta <= 0:
                raise ValueError(f"rope theta must be positive, not {rope.theta!r}")
            if rope.divisors and (len(rope.divisors) != self.head_size // 2 or min(rope.divisors) <= 0):
                raise ValueError(f"rope divisors must be {self.head_size // 2} positive numbers, not {rope.divisors}")

    def paged_state(self, element_bytes: int) -> PagedState:
        """Keys and values of all layers, of elements of this size."""
        return PagedState(
            layers=tuple(range(self.layers)),
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            element_bytes=element_bytes,
        )
