"""Decoders for tests of the engine.

`SyntheticDecoder` is a deterministic model that lives in real paged memory: it writes token ids into its cache through
the block table and reads them back through it, so that wrong wiring changes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine_actor.core.engine import Engine
from engine_actor.decoding.decoder import PackedStep
from engine_actor.limits import FairnessBounds
from engine_actor.manifest import DecoderManifest, PagedState, WindowedState
from engine_actor.memory.layout import PoolGeometry
from engine_actor.requests.events import EngineEvent
from engine_actor.requests.request import Request
from tests.support.engines import engine_of
from tests.support.logits_decoder import HostSampled

POISON = -(10**9)


def next_token(sequence: list[int], vocab: int = 64) -> int:
    """next(seq) = (seq[0] + seq[-1] + len(seq)) mod vocab."""
    return (sequence[0] + sequence[-1] + len(sequence)) % vocab


class SyntheticDecoder(HostSampled):
    row_invariant = True

    def __init__(self, vocab: int = 64, eos: int = 1, context: int = 4096, drafts: int = 0) -> None:
        paged = PagedState((0,), 1, 1, 8)
        self.manifest = DecoderManifest(vocab, context, frozenset({eos}), paged, drafts, cache_identity="tokens")
        self.steps: list[PackedStep] = []
        self.fail_next: Callable[[], BaseException] | None = None  # raised once, after the step's writes
        self.fail_before: Callable[[], BaseException] | None = None  # raised once, before anything is written
        self.choose: Callable[[list[int]], int] = lambda sequence: next_token(sequence, vocab)

    def allocate(self, pools: PoolGeometry) -> None:
        self.block_size = pools.block_size
        self.cache = np.full((pools.num_blocks, pools.block_size), POISON, np.int64)

    def forward(self, step: PackedStep) -> np.ndarray:
        self.steps.append(step)
        if self.fail_before is not None:
            fail, self.fail_before = self.fail_before, None
            raise fail()
        for source, destination in step.block_copies:
            self.cache[destination] = self.cache[source]
        self.write_beside(step)
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
            out[i] = self.row_logits(self.sequence_at(int(wanted), logits[int(wanted)]))
        return out

    def read_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        return self.cache[None, list(blocks)]

    def write_blocks(self, blocks: Sequence[int], content: np.ndarray) -> None:
        self.cache[list(blocks)] = content[0]

    def write_beside(self, step: PackedStep) -> None:
        """This model has no memory beside its cache."""
        assert step.state_slots is None and step.windowed_table is None

    def sequence_at(self, token: int, cached: list[int]) -> list[int]:
        """What the model knows at a packed token; `cached` was read from the cache."""
        return cached

    @property
    def decode_calls(self) -> int:
        return len(self.steps)

    def packed_counts(self) -> list[list[int]]:
        """Tokens of each row, step by step."""
        return [np.diff(step.cumulative_sequence_lengths).tolist() for step in self.steps]

    def row_logits(self, sequence: list[int]) -> np.ndarray:
        row = np.zeros(self.manifest.vocab_size, np.float32)
        row[self.choose(sequence)] = 100.0
        return row

    allows_block_zero = True

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        tokens = [int(self.cache[table[p // self.block_size], p % self.block_size]) for p in range(length)]
        assert POISON not in tokens, "a position was read that nobody wrote"
        return tokens


def solo(prompt: list[int], count: int, vocab: int = 64, eos: int = 1) -> list[int]:
    """What the synthetic model answers to a prompt on its own: at most `count` tokens, ended by EOS."""
    sequence, out = list(prompt), list[int]()
    while len(out) < count:
        token = next_token(sequence, vocab)
        if token == eos:
            break
        sequence.append(token)
        out.append(token)
    return out


P10, P20, P30 = [4, 5, 6], [6, 7, 8], [8, 9, 10]


class ForcedDecoder(SyntheticDecoder):
    """Answers what a test forces: always the same token, or a list of tokens, one for each row that is sampled.

    Vocabulary 32, EOS 1, context 128.
    """

    def __init__(self, forced: int | list[int] = 5, context: int = 128, drafts: int = 0) -> None:
        super().__init__(vocab=32, eos=1, context=context, drafts=drafts)
        self.force(forced)

    def force(self, forced: int | list[int]) -> None:
        if isinstance(forced, int):
            self.choose = lambda _: forced
        else:
            script = iter(forced)
            self.choose = lambda _: next(script)


class MixingDecoder(SyntheticDecoder):
    """Its logits depend on every token of the sequence and on their order: whatever wrong row is read, the answer
    changes. Two tokens are likely, so that sampling has a choice."""

    def row_logits(self, sequence: list[int]) -> np.ndarray:
        return mixing_logits(sequence, self.manifest.vocab_size)


class RecurrentDecoder(SyntheticDecoder):
    """Its answers come from a state alone: what the slots hold is the sequence that they have seen. The cache is
    written and read as well, so that both must agree."""

    def __init__(self, vocab: int = 64, eos: int = 1, context: int = 4096) -> None:
        super().__init__(vocab, eos, context)
        self.manifest = replace(self.manifest, state_bytes=8)

    def allocate(self, pools: PoolGeometry) -> None:
        super().allocate(pools)
        self.slots: list[list[int] | None] = [None] * pools.state_slots
        self.slots[0] = []

    def write_beside(self, step: PackedStep) -> None:
        assert step.state_slots is not None and step.state_slots.dtype == np.int32
        reads, writes = step.state_slots[:, 0].tolist(), step.state_slots[:, 1].tolist()
        assert 0 not in writes and len(set(writes)) == len(writes) and not set(reads) & set(writes)
        self._known: dict[int, list[int]] = {}
        starts = step.cumulative_sequence_lengths
        for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
            state = self.slots[read]
            assert state is not None and len(state) == step.past_sequence_lengths[row], "a state of another position"
            for i in range(int(starts[row]), int(starts[row + 1])):
                state = [*state, int(step.input_ids[i])]
                self._known[i] = state
            self.slots[write] = state

    def sequence_at(self, token: int, cached: list[int]) -> list[int]:
        assert self._known[token] == cached
        return self._known[token]


class RecurrentMixingDecoder(RecurrentDecoder, MixingDecoder):
    pass


class WindowedDecoder(SyntheticDecoder):
    """A second layer keeps the last `window` tokens in rings. What a token sees is read there, after all tokens of the
    step were written, and only what lies before comes from the cache."""

    def __init__(self, vocab: int = 64, eos: int = 1, context: int = 4096, drafts: int = 0, window: int = 3) -> None:
        super().__init__(vocab, eos, context, drafts)
        self.manifest = replace(self.manifest, windowed=WindowedState((1,), 1, 1, 8, window))
        self.window = window

    def allocate(self, pools: PoolGeometry) -> None:
        super().allocate(pools)
        self.rings = np.full((pools.window_blocks, pools.block_size), POISON, np.int64)

    def write_beside(self, step: PackedStep) -> None:
        table = step.windowed_table
        assert table is not None and table.dtype == np.int32 and (table >= 0).all()
        assert table.shape == step.block_table.shape
        starts = step.cumulative_sequence_lengths
        self._seen: dict[int, list[int]] = {}
        for writing in (True, False):
            for row in range(len(starts) - 1):
                for i in range(int(starts[row]), int(starts[row + 1])):
                    at = int(step.position_ids[i])
                    if writing:
                        self.rings[self._slot(table[row], at)] = step.input_ids[i]
                    else:
                        span = range(max(0, at + 1 - self.window), at + 1)
                        self._seen[i] = [int(self.rings[self._slot(table[row], p)]) for p in span]

    def _slot(self, row: np.ndarray, position: int) -> tuple[int, int]:
        return int(row[position // self.block_size]), position % self.block_size

    def sequence_at(self, token: int, cached: list[int]) -> list[int]:
        seen = self._seen[token]
        return cached[: len(cached) - len(seen)] + seen


class WindowedMixingDecoder(WindowedDecoder, MixingDecoder):
    pass


def mixing_logits(sequence: list[int], vocab: int) -> np.ndarray:
    state = 7
    for token in sequence:
        state = (state * 31 + token + 1) % 10007
    row = np.zeros(vocab, np.float32)
    row[(state // 3) % vocab] = 9.5
    row[state % vocab] = 10.0
    return row


def build_engine(decoder: SyntheticDecoder, **config: object) -> Engine:
    """An engine for tests: 128 blocks of 4, 8 rows, the plain order and nothing shared, unless stated."""
    defaults: dict[str, object] = {
        "num_blocks": 128,
        "block_size": 4,
        "max_batch_size": 8,
        "fairness": FairnessBounds.off(),
        "prefix_reuse": False,
    }
    return engine_of(decoder, **{**defaults, **config})  # type: ignore[arg-type]


def run_out(engine: Engine, capacity: int = 64, limit: int = 2000) -> list[EngineEvent]:
    """Runs until nothing is pending; the engine's invariants are checked after each call."""
    events: list[EngineEvent] = []
    for _ in range(limit):
        if not engine.has_pending_requests():
            return events
        events += engine.run(capacity)
        engine.check_integrity()
    raise AssertionError(f"work is still pending after {limit} runs")


def tokens_of(events: Sequence[EngineEvent], request: Request) -> list[int]:
    return [e.token for e in events if e.request_id == request.id and e.token is not None]
