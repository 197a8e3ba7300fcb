"""The model behind the engine: what a decoder declares, what it is given in a step, what it gives back.

A decoder owns the tensors of the pools and nothing else that changes: which block belongs to whom is the engine's
business. It writes only into the blocks and slots that the step names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_actor.errors import InvalidOption

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


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
        known = [*self.paged.layers, *windowed.layers]
        if not windowed.layers or min(known) < 0 or len(set(known)) != len(known):
            raise InvalidOption("windowed.layers", windowed.layers, "layers of the model that no other group has")


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The pools a decoder allocates, once. `num_blocks` counts the null block 0 where the engine keeps one;
    `state_slots` counts slot 0, which is never written: it stands for a state of zeros. `window_blocks` are those of
    all rings, with their own null block."""

    num_blocks: int
    block_size: int
    state_slots: int = 0
    window_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One variable-length batch, without padding (F233). All arrays are int32 unless said otherwise.

    input_ids                    int64 [tokens]   the rows' tokens, one row after the other
    position_ids                 int64 [tokens]   past_sequence_lengths[row] + offset in the row
    cumulative_sequence_lengths  [rows + 1]       starts with 0; row i is [c[i], c[i+1])
    past_sequence_lengths        [rows]           committed KV positions of each row
    block_table                  [rows, columns]  physical blocks by position, padded with -1 on the right (F134)
    attention_metadata           [3]              max query length, upper and lower bound of the longest KV (F237)
    logits_rows                  int64 [wanted]   packed token indices whose logits are returned, in this order
    block_copies                 (source, destination) pairs, copied in all layers before anything else of this step
    state_slots                  [rows, 2]        slot to read (0: start from zeros), slot to write; None: no states. No
                                                  slot is read by one row and written by another
    windowed_table               [rows, columns]  as block_table for windowed layers: the row's ring over and over, so
                                                  without padding (F225); None: no such layers
    """

    input_ids: Int64
    position_ids: Int64
    cumulative_sequence_lengths: Int32
    past_sequence_lengths: Int32
    block_table: Int32
    attention_metadata: Int32
    logits_rows: Int64
    block_copies: tuple[tuple[int, int], ...] = field(default=())
    state_slots: Int32 | None = None
    windowed_table: Int32 | None = None


class Decoder(Protocol):
    """Implemented by every backend and by the doubles of the tests; one conformance suite runs over all of them."""

    @property
    def manifest(self) -> DecoderManifest: ...

    @property
    def row_invariant(self) -> bool:
        """A row's logits are bitwise the same in any batch, for any chunking and any placement of its blocks."""
        ...

    def allocate(self, pools: PoolGeometry) -> None:
        """Allocates the pools. Called once, before the first `forward`. May raise MemoryError."""
        ...

    def forward(self, step: PackedStep) -> Any:
        """Logits [len(step.logits_rows), vocab_size], float32, as a torch tensor on any device or a numpy array.

        Raises RetryableStepError (nothing is wrong with the decoder, the same step may succeed later) or
        ExecutionMemoryExceeded; MemoryError and torch's out-of-memory error count as the latter, all else is fatal.
        """
        ...

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[Any]:
        """A copy of what these paged blocks hold, in host memory: [parts, len(blocks), ...]. The parts of a transformer
        are the keys of its first layer, the values of it, the keys of the second and so on: [2 * layers, len(blocks),
        block_size, kv_heads, head_size], bfloat16 as uint16. Called only if `manifest.blocks_can_move`."""
        ...

    def write_blocks(self, blocks: Sequence[int], content: NDArray[Any]) -> None:
        """Fills these paged blocks with what `read_blocks` gave, here or in a decoder of the same identity and block
        size. `content` may be read-only."""
        ...
