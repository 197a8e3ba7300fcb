"""The model behind the engine: what a decoder declares, what it is given in a step, what it gives back.

A decoder owns the tensors of the pools and nothing else that changes: which block belongs to whom is the engine's
business. It writes only into the blocks and slots that the step names. And it chooses the tokens, where its logits
are: the engine never sees logits.

    engine     pack   launch ..................................... collect   prepare, commit
    decoder             copies of blocks, layers, logits, sampler   tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_actor.manifest import DecoderManifest
from engine_actor.memory.layout import PoolGeometry
from engine_actor.sampling.logprobs import TokenLogprob
from engine_actor.sampling.sample_row import SampleRow

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
    logits_rows                  int64 [samples]  packed token indices after which a token is chosen, in this order
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


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What a step gives back, for each of its `logits_rows`, in their order.

    tokens           the chosen one; None: no finite number was left to choose by, so that its row fails alone
    logprobs         of the chosen one; None where the row asked for none or has no token. Empty: no row asked
    decoder_seconds  time that the model took, without choosing
    """

    tokens: Sequence[int | None]
    logprobs: Sequence[TokenLogprob | None] = ()
    decoder_seconds: float = 0.0


class Launched(Protocol):
    """A step that has begun."""

    def collect(self) -> SampledStep:
        """Waits for the step's end. Called once. Raises what `launch` may raise."""
        ...


class Decoder(Protocol):
    """Implemented by every backend and by the doubles of the tests; one conformance suite runs over all of them."""

    @property
    def manifest(self) -> DecoderManifest: ...

    @property
    def row_invariant(self) -> bool:
        """A row's logits, and so its tokens, are bitwise the same in any batch, for any chunking and any placement of
        its blocks."""
        ...

    def allocate(self, pools: PoolGeometry) -> None:
        """Allocates the pools. Called once, before the first `launch`. May raise MemoryError."""
        ...

    def launch(self, step: PackedStep, rows: Sequence[SampleRow]) -> Launched:
        """Begins a step. `rows` say how the token is chosen that follows each of `step.logits_rows`, in that order.

        What a step raises, here or in `collect`, says what the engine does with it: it is rolled back, and then
            ExecutionMemoryExceeded, MemoryError  memory ran out: it may succeed when there is more
            RetryableStepError                    nothing is wrong with the decoder: it may succeed at the next try
            SamplingFailed                        the same, and the model had run
            any other error                       is fatal, the engine stops
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
