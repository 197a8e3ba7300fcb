"""What a model declares of itself: the states that its layers keep, and the limits of its tokens and positions."""

from __future__ import annotations

from dataclasses import dataclass

from engine_actor.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class PagedState:
    """The one paged_kv group: keys and values of `layers`, each [num_blocks, block_size, kv_heads, head_size]."""

    layers: tuple[int, ...]
    kv_heads: int
    head_size: int
    element_bytes: int

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values (F008)."""
        return 2 * len(self.layers) * block_size * self.kv_heads * self.head_size * self.element_bytes


@dataclass(frozen=True, slots=True)
class WindowedState(PagedState):
    """Keys and values of layers that see only the last `window` positions, the query's own included. They live in rings
    of blocks (`engine_actor.memory.window_ring`), addressed through `PackedStep.windowed_table`."""

    window: int


@dataclass(frozen=True, slots=True)
class DecoderManifest:
    """What the engine must know of a model; it never asks for the model's name (F002).

    vocab_size        columns of the logits
    context_length    longest sequence that the positions allow
    eos_token_ids     end a turn unless the turn ignores them
    max_draft_tokens  drafts of one proposal that a step may verify; 0: none. A decoder that declares more returns the
                      logits of any packed token, not only of a row's last one (F295)
    state_bytes       of one slot of recurrent and convolutional states over all layers; 0: the model has none
    windowed          layers that keep a ring instead of the whole sequence; None: no such layers. At least one layer
                      keeps the whole sequence (F011)
    cache_identity    all that the content of a block depends on beside its tokens and positions: weights,
                      configuration, type of the elements. "": it is not known, and blocks stay where they are
    """

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    paged: PagedState
    max_draft_tokens: int = 0
    state_bytes: int = 0
    windowed: WindowedState | None = None
    cache_identity: str = ""

    @property
    def blocks_can_move(self) -> bool:
        """Another decoder of the same identity can go on from a request's paged blocks: they are all that it keeps."""
        return bool(self.cache_identity) and not self.state_bytes and self.windowed is None

    def __post_init__(self) -> None:
        windowed = self.windowed
        if windowed is None:
            return
        if windowed.window < 1:
            raise InvalidOption("windowed.window", windowed.window, "at least 1")
        if not self.paged.layers:
            raise InvalidOption("paged.layers", (), "at least one layer that keeps the whole sequence")
        layers = [*self.paged.layers, *windowed.layers]
        if not windowed.layers or min(layers) < 0 or len(set(layers)) != len(layers):
            raise InvalidOption("windowed.layers", windowed.layers, "layers of the model that no other group has")
