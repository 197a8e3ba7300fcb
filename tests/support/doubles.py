"""Decoders for tests of the engine.

`SyntheticDecoder` is a deterministic model that lives in real paged memory: it writes token ids into its cache through
the block table and reads them back through it, so that wrong wiring changes tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine_actor.decoding.decoder import DecoderManifest, PackedStep, PagedState, PoolGeometry

POISON = -(10**9)


def next_token(sequence: list[int], vocab: int = 64) -> int:
    """next(seq) = (seq[0] + seq[-1] + len(seq)) mod vocab."""
    return (sequence[0] + sequence[-1] + len(sequence)) % vocab


class SyntheticDecoder:
    row_invariant = True

    def __init__(self, vocab: int = 64, eos: int = 1, context: int = 4096) -> None:
        self.manifest = DecoderManifest(vocab, context, frozenset({eos}), PagedState((0,), 1, 1, 8))
        self.steps: list[PackedStep] = []
        self.fail_next: Callable[[], Exception] | None = None
        self.choose: Callable[[list[int]], int] = lambda sequence: next_token(sequence, vocab)

    def allocate(self, pools: PoolGeometry) -> None:
        self.block_size = pools.block_size
        self.cache = np.full((pools.num_blocks, pools.block_size), POISON, np.int64)

    def forward(self, step: PackedStep) -> np.ndarray:
        self.steps.append(step)
        for source, destination in step.block_copies:
            self.cache[destination] = self.cache[source]
        logits = {}
        starts = step.cumulative_sequence_lengths
        for row in range(len(starts) - 1):
            begin, end = int(starts[row]), int(starts[row + 1])
            past = int(step.past_sequence_lengths[row])
            for i in range(begin, end):
                position = int(step.position_ids[i])
                assert position == past + i - begin
                block = int(step.block_table[row, position // self.block_size])
                assert block > 0 or self.allows_block_zero
                self.cache[block, position % self.block_size] = step.input_ids[i]
                if i in step.logits_rows:
                    logits[i] = self._read(step.block_table[row], position + 1)
        if self.fail_next is not None:
            # After the writes: a rolled-back step must not leave anything that is read as valid.
            fail, self.fail_next = self.fail_next, None
            raise fail()
        out = np.zeros((len(step.logits_rows), self.manifest.vocab_size), np.float32)
        for i, wanted in enumerate(step.logits_rows):
            out[i, self.choose(logits[int(wanted)])] = 100.0
        return out

    allows_block_zero = True

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        tokens = [int(self.cache[table[p // self.block_size], p % self.block_size]) for p in range(length)]
        assert POISON not in tokens, "a position was read that nobody wrote"
        return tokens


def solo(prompt: list[int], count: int, vocab: int = 64, eos: int = 1) -> list[int]:
    """What the synthetic model answers to a prompt on its own: at most `count` tokens, ended by EOS."""
    sequence, out = list(prompt), []
    while len(out) < count:
        token = next_token(sequence, vocab)
        if token == eos:
            break
        sequence.append(token)
        out.append(token)
    return out
