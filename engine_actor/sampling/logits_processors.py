"""What changes a row's logits before a token is chosen, in this order: grammar, bias, penalties, bans, n-grams.

Each is a function of the row's own tokens and options, so nothing is kept between steps: a rollback, a preemption and a
replay elsewhere see the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_actor.options import SamplingParams
from engine_actor.sampling.sample_row import RowContext

Float32 = NDArray[np.float32]

# What is added to eight logits, for each byte of bits. To look that up takes as long whatever is allowed; to set logits
# by a condition up to fifteen times as long, where the condition is hard to foresee.
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED = _ADDED.astype(np.float32)


def bytes_of_bits(vocab_size: int) -> int:
    """In whole words of 32 bits (F292)."""
    return (vocab_size + 31) // 32 * 4


def process(logits: Float32, params: SamplingParams, context: RowContext, room: Float32) -> Float32:
    """The changed logits of one row, float32 [vocab]: the beginning of `room`, which has 8 entries for each byte of the
    mask."""
    changed = room[: len(logits)]
    mask = None if context.mask is None else context.mask()
    if mask is None:
        np.copyto(changed, logits)
    else:
        _ADDED.take(mask, axis=0, out=room.reshape(-1, 8), mode="clip")  # 'clip' spares a copy
        changed += logits
    for token, bias in params.logit_bias:
        changed[token] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(changed, context.tokens, params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        _penalise_output(changed, context, params.presence_penalty, params.frequency_penalty)
    if context.banned:
        changed[sorted(context.banned)] = -np.inf
    if params.no_repeat_ngram_size:
        changed[_completions(context.tokens, params.no_repeat_ngram_size)] = -np.inf
    return changed


def _completions(tokens: Sequence[int], size: int) -> NDArray[np.int64]:
    """Of the whole sequence, the tokens that followed each earlier occurrence of its last `size - 1` (F280)."""
    sequence = np.asarray(tokens, np.int64)
    starts = len(sequence) - size + 1  # of all runs of `size`
    if starts <= 0:
        return sequence[:0]
    same = np.ones(starts, np.bool_)
    for offset in range(size - 1):
        same &= sequence[offset : offset + starts] == sequence[starts + offset]
    return sequence[size - 1 :][same]


def _penalise_repetition(logits: Float32, tokens: Sequence[int], penalty: float) -> None:
    """Every token of the sequence once: logit / penalty if positive, else logit * penalty (F279)."""
    ids = np.unique(np.asarray(tokens, np.int64))
    values = logits[ids]
    logits[ids] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def _penalise_output(logits: Float32, context: RowContext, presence: float, frequency: float) -> None:
    """presence once, frequency by count, for tokens that this turn generated."""
    if not context.generated:
        return
    output = np.asarray(context.tokens[len(context.tokens) - context.generated :], np.int64)
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)
