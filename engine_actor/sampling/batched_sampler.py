"""Chooses the next token of each row from its logits.

The rule: temperature; then top_k; then top_p over what top_k left, renormalised; then one uniform number u picks the
first candidate, in order of (-logit, token id), at which the cumulative probability exceeds u. A token is a function of
its row's logits and parameters, its seed and the token's absolute index in the sequence, and of nothing else: every row
is computed alone, by the same operations, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_actor.options import SamplingParams
from engine_actor.sampling.philox import uniforms

Float32 = NDArray[np.float32]

NO_WEIGHT = 110.0  # exp(-110) is 0 in float32: whatever lies further below the peak can never be drawn


@dataclass(frozen=True, slots=True)
class SampleRow:
    """position: absolute index that the chosen token will have in its sequence."""

    params: SamplingParams
    position: int


class BatchedSampler:
    def sample(self, logits: Any, rows: Sequence[SampleRow]) -> list[int | None]:
        """One token a row; None for a row whose logits hold no usable number, so that it fails alone.

        logits: float32 [len(rows), vocab], a torch tensor on any device or a numpy array.
        """
        if not rows:
            return []
        host = _to_host(logits)
        assert host.shape[0] == len(rows), f"{host.shape[0]} rows of logits for {len(rows)} samples"
        best = host.argmax(axis=1)
        # argmax stops at the first NaN, so a peak that is finite is a true one.
        peaks = host[np.arange(len(rows)), best]
        tokens = [int(token) if ok else None for token, ok in zip(best, np.isfinite(peaks), strict=True)]
        random = [i for i, row in enumerate(rows) if not row.params.greedy and tokens[i] is not None]
        if random:
            draws = uniforms([rows[i].params.seed for i in random], [rows[i].position for i in random])
            for i, u in zip(random, draws, strict=True):
                tokens[i] = _draw(host[i], float(peaks[i]), rows[i].params, float(u))
        return tokens


def _to_host(logits: Any) -> Float32:
    if isinstance(logits, np.ndarray):
        return logits
    array: Float32 = logits.cpu().numpy()
    return array


def _draw(logits: Float32, peak: float, params: SamplingParams, u: float) -> int:
    """Inverse CDF over as few candidates as decide it: those within a distance of the peak, widened until the
    answer cannot depend on the rest."""
    scaled = (logits - np.float32(peak)) / np.float32(params.temperature)
    vocab = len(scaled)
    top_k = min(params.top_k, vocab) if params.top_k else vocab
    # Without top_k the weights of all tokens are needed, as the sum that u is measured against.
    total = float(np.exp(scaled, dtype=np.float32).sum(dtype=np.float64)) if top_k == vocab else 0.0
    width = 8.0
    while True:
        final = width > NO_WEIGHT
        near = np.flatnonzero(scaled >= -width)
        if final or total or len(near) >= top_k:
            token = _pick(scaled, near, top_k, total, params.top_p, u, final)
            if token is not None:
                return token
        width *= 2.0


def _pick(
    scaled: Float32, near: NDArray[np.int64], top_k: int, total: float, top_p: float, u: float, final: bool
) -> int | None:
    """The chosen token, or None if candidates outside `near` could be the answer."""
    values = scaled[near]
    order = np.lexsort((near, -values))[:top_k]
    cumulative = np.exp(values[order], dtype=np.float32).cumsum(dtype=np.float64)
    complete = final or len(order) == top_k
    if complete:
        total = float(cumulative[-1])
    kept, mass = len(cumulative), total
    if top_p < 1.0:
        # The shortest head whose probability reaches top_p; u then runs over that head alone.
        kept = int(np.searchsorted(cumulative, top_p * total, side="left")) + 1
        if kept > len(cumulative):
            if not complete:
                return None
            kept = len(cumulative)
        mass = float(cumulative[kept - 1])
    chosen = int(np.searchsorted(cumulative[:kept], u * mass, side="right"))
    if chosen >= kept:
        if not complete:
            return None
        chosen = kept - 1
    return int(near[order[chosen]])
