"""Packed steps for decoder tests, built by hand from rows of (tokens, past, blocks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_actor.decoding.decoder import PackedStep
from tests.support.logits_decoder import LogitsDecoder


@dataclass(frozen=True)
class Row:
    """tokens: of this step. past: positions already in the pools. blocks: the row's physical blocks."""

    tokens: Sequence[int]
    past: int
    blocks: Sequence[int]


STATE_SLOTS = 1 + 64 * 64


def state_slot(row: Row, position: int) -> int:
    """Slot of a row's state at a position: each sequence, known by its first block, has one for each."""
    return 1 + row.blocks[0] * 64 + position if position else 0


def pack(
    rows: Sequence[Row],
    logits_rows: Sequence[int] | None = None,
    copies: Sequence[tuple[int, int]] = (),
    states: bool = False,
) -> PackedStep:
    """One step of these rows; the logits of every token unless `logits_rows` chooses. With state slots if `states`."""
    lengths = [len(row.tokens) for row in rows]
    ends = [row.past + len(row.tokens) for row in rows]
    table = np.full((len(rows), max(len(row.blocks) for row in rows)), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.blocks)] = row.blocks
    wanted = range(sum(lengths)) if logits_rows is None else logits_rows
    return PackedStep(
        input_ids=np.concatenate([np.asarray(row.tokens, np.int64) for row in rows]),
        position_ids=np.concatenate([np.arange(row.past, end) for row, end in zip(rows, ends, strict=True)]),
        cumulative_sequence_lengths=np.cumsum([0, *lengths], dtype=np.int32),
        past_sequence_lengths=np.array([row.past for row in rows], np.int32),
        block_table=table,
        attention_metadata=np.array([max(lengths), max(ends), max(ends)], np.int32),
        logits_rows=np.array(wanted, np.int64),
        block_copies=tuple(copies),
        state_slots=np.array(
            [(state_slot(row, row.past), state_slot(row, end)) for row, end in zip(rows, ends, strict=True)], np.int32
        )
        if states
        else None,
    )


def run_in_chunks(decoder: LogitsDecoder, tokens: Sequence[int], chunk: int, blocks: Sequence[int]) -> torch.Tensor:
    """Logits of every token of one sequence, `chunk` tokens a step: float32 [len(tokens), vocab]."""
    parts = [
        decoder.forward(pack([Row(tokens[start : start + chunk], start, blocks)]))
        for start in range(0, len(tokens), chunk)
    ]
    return torch.cat(parts)
