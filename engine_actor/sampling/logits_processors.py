"""What changes a row's logits before a token is chosen, in this order: grammar, bias, penalties, bans.

Each is a function of the row's own tokens and options, so nothing is kept between steps: a rollback, a preemption and a
replay elsewhere see the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_actor.options import SamplingParams

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowContext:
    """tokens: the whole sequence; the last `generated` of them are this turn's. banned: may not be chosen now, such as
    what would end a turn below its minimum length (F278). allowed: bool [vocab], what a grammar lets follow."""

    tokens: Sequence[int]
    generated: int
    banned: frozenset[int] = frozenset()
    allowed: NDArray[np.bool_] | None = None


def process(logits: Float32, params: SamplingParams, context: RowContext) -> None:
    """Changes one row, float32 [vocab], in place."""
    if context.allowed is not None:
        logits[~context.allowed] = -np.inf
    for token, bias in params.logit_bias:
        logits[token] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(logits, context.tokens, params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        _penalise_output(logits, context, params.presence_penalty, params.frequency_penalty)
    if context.banned:
        logits[sorted(context.banned)] = -np.inf


def _penalise_repetition(logits: Float32, tokens: Sequence[int], penalty: float) -> None:
    """Every token of the sequence once: logit / penalty if positive, else logit * penalty (F279)."""
    seen = np.unique(np.asarray(tokens, np.int64))
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def _penalise_output(logits: Float32, context: RowContext, presence: float, frequency: float) -> None:
    """presence once, frequency by count, for tokens that this turn generated."""
    if not context.generated:
        return
    output = np.asarray(context.tokens[len(context.tokens) - context.generated :], np.int64)
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)
