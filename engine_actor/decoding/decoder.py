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

from engine_actor.manifest import DecoderManifest
from engine_actor.memory.layout import PoolGeometry

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


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
