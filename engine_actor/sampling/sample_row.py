"""What a decoder is told of each row whose next token it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_actor.options import SamplingParams

Bits = NDArray[np.uint8]
"""One for each token of the vocabulary, the first in the lowest place of a byte."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """What changes a row's logits, beside its parameters.

    tokens     the whole sequence; the last `generated` of them are this turn's
    banned     may not be chosen now, such as what would end a turn below its minimum length (F278)
    mask       computes what a grammar lets follow (None: everything), uint8 [bytes_of_bits(vocab_size)]; None: there
               is no grammar. It is called once, when the logits are there, so that a mask may be computed while the
               model runs
    """

    tokens: Sequence[int]
    generated: int
    banned: frozenset[int] = frozenset()
    mask: Callable[[], Bits | None] | None = None


@dataclass(slots=True)
class SampleRow:
    """position: absolute index that the chosen token will have in its sequence; with `params.seed` it names the draw.
    context: only where the row's logits are changed first. logprobs: of how many likeliest tokens the logarithms of
    probability are wanted beside the chosen one's; None: of none. Not frozen only because a frozen one takes three
    times as long to make."""

    params: SamplingParams
    position: int
    context: RowContext | None = None
    logprobs: int | None = None
