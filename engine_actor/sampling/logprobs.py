"""What the model thought of a token: logarithms of probabilities, before any sampling option."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the model's probability, before sampling options; `top` holds the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprob_of(logits: Float32, token: int, top: int) -> TokenLogprob:
    """Of one row, float32 [vocab]: the chosen token's, and of the `top` likeliest in order of (-logit, id)."""
    peak = logits.max()
    normaliser = float(peak) + float(np.log(np.exp(logits - peak, dtype=np.float32).sum(dtype=np.float64)))
    likeliest: tuple[tuple[int, float], ...] = ()
    if top:
        border = np.partition(logits, len(logits) - top)[len(logits) - top]
        near = np.flatnonzero(logits >= border)
        order = near[np.lexsort((near, -logits[near]))][:top]
        likeliest = tuple((int(i), float(logits[i]) - normaliser) for i in order)
    return TokenLogprob(token, float(logits[token]) - normaliser, likeliest)
