"""Chooses the next token of each row from its logits.

The rule: what `logits_processors` changes; temperature; min_p; top_k; top_p over what is left, renormalised; then one
uniform number u picks the first candidate, in order of (-logit, token id), at which the cumulative probability exceeds
u. A token is a function of its row's logits, tokens and parameters, its seed and its absolute index in the sequence,
and of nothing else: every row is computed alone, by the same operations, whatever else is in the batch.

Sorting a vocabulary would cost more than the rest of a step. Here only the few candidates are sorted among which the
answer must lie; which they are is found by adding up weights between two bounds on the logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine_actor.options import SamplingParams
from engine_actor.sampling.logits_processors import bytes_of_bits, process
from engine_actor.sampling.philox import uniforms
from engine_actor.sampling.sample_row import SampleRow

Float32 = NDArray[np.float32]
Ids = NDArray[np.intp]

EDGE = 1e-9  # share at the far end that is never asked for: far above the rounding of sums, far below what can be seen


class BatchedSampler:
    def __init__(self) -> None:
        # Of one row at a time; grown to the vocabulary once.
        self._weights = np.empty(0, np.float32)
        self._changed = np.empty(0, np.float32)

    def sample(self, logits: Float32, rows: Sequence[SampleRow]) -> list[int | None]:
        """One token a row; None for a row whose logits hold no usable number, so that it fails alone.

        logits: float32 [len(rows), vocab]. Left as they are.
        """
        if not rows:
            return []
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} samples"
        best = logits.argmax(axis=1)
        # argmax stops at the first NaN, so a peak that is finite is a true one.
        peaks = logits[np.arange(len(rows)), best]
        tokens: list[int | None] = best.tolist()
        for broken in np.flatnonzero(~np.isfinite(peaks)):
            tokens[broken] = None
        own = [i for i, row in enumerate(rows) if row.context is not None or not row.params.greedy]
        if own:
            self._make_room(logits.shape[1])
            random = [rows[i] for i in own if not rows[i].params.greedy]
            draws = iter(uniforms([r.params.seed for r in random], [r.position for r in random]) if random else ())
            with np.errstate(over="ignore"):  # a logit infinitely far below the peak has no weight, as it should
                for i in own:
                    u = None if rows[i].params.greedy else float(next(draws))
                    tokens[i] = self._choose(logits[i], peaks[i], tokens[i], rows[i], u)
        return tokens

    def _choose(
        self, logits: Float32, peak: np.float32, best: int | None, row: SampleRow, u: float | None
    ) -> int | None:
        """Of one row, whose largest logit is `peak`, that of the token `best`. `u`: None takes that one."""
        if row.context is not None:
            logits = process(logits, row.params, row.context, self._changed)
            best = int(logits.argmax())
            peak = logits[best]
            if not np.isfinite(peak):
                return None
        return best if best is None or u is None else _draw(logits, peak, row.params, u, self._weights)

    def _make_room(self, vocab_size: int) -> None:
        if len(self._weights) < vocab_size:
            self._weights = np.empty(vocab_size, np.float32)
            self._changed = np.empty(8 * bytes_of_bits(vocab_size), np.float32)


def _draw(logits: Float32, peak: np.float32, params: SamplingParams, u: float, room: Float32) -> int:
    if params.min_p == 0.0:
        return _draw_among(logits, peak, params, u, room)
    least = peak + np.float32(params.temperature) * np.float32(math.log(params.min_p))
    likely = np.flatnonzero(logits >= least)
    return int(likely[_draw_among(logits[likely], peak, params, u, room)])


def _draw_among(logits: Float32, peak: np.float32, params: SamplingParams, u: float, room: Float32) -> int:
    temperature = np.float32(params.temperature)
    if 0 < params.top_k < len(logits):
        return _draw_of_few(logits, peak, temperature, params, u)
    candidates = _Candidates(logits, peak, temperature, room)
    if params.top_p == 1.0:
        return candidates.locate(u, "right")
    nucleus = candidates.through(candidates.locate(params.top_p, "left"))
    return int(nucleus[_Candidates(logits[nucleus], peak, temperature, room).locate(u, "right")])


def _draw_of_few(logits: Float32, peak: np.float32, temperature: np.float32, params: SamplingParams, u: float) -> int:
    """With top_k the candidates are few, so they are simply sorted."""
    ids = _largest(logits, peak, params.top_k)
    cumulative = np.exp((logits[ids] - peak) / temperature).cumsum(dtype=np.float64)
    count = len(ids)
    if params.top_p < 1.0:
        count = int(np.searchsorted(cumulative, min(params.top_p, 1.0 - EDGE) * cumulative[-1], "left")) + 1
    return int(ids[np.searchsorted(cumulative[:count], min(u, 1.0 - EDGE) * cumulative[count - 1], "right")])


def _largest(logits: Float32, peak: np.float32, count: int) -> Ids:
    """Ids of the `count` largest logits, in order of (-logit, id)."""
    for reach in (4.0, 32.0, np.inf):  # nearly always the first few below the peak are enough
        near = np.flatnonzero(logits >= peak - np.float32(reach))
        if len(near) >= count:
            break
    values = logits[near]
    near = near[values >= np.partition(values, len(near) - count)[len(near) - count]]
    ordered: Ids = near[np.argsort(-logits[near], kind="stable")[:count]]
    return ordered


class _Candidates:
    """Logits of one row in ascending order of id, with their weights exp((logit - peak) / temperature)."""

    def __init__(self, logits: Float32, peak: np.float32, temperature: np.float32, room: Float32) -> None:
        self._peak = peak
        self._temperature = temperature
        self._logits = logits
        self._weights = room[: len(logits)]
        self._weigh(logits, self._weights)
        self._total = float(self._weights.sum(dtype=np.float64))

    def through(self, last: int) -> Ids:
        """Indices of all candidates that do not come after `last` in order of (-logit, id), ascending."""
        inside = self._logits >= self._logits[last]
        inside[last + 1 :] &= self._logits[last + 1 :] != self._logits[last]
        return np.flatnonzero(inside)

    def locate(self, share: float, side: Literal["left", "right"]) -> int:
        """Index of the first candidate, in order of (-logit, id), at which the cumulative weight reaches ("left") or
        exceeds ("right") a share of the total."""
        target = min(share, 1.0 - EDGE) * self._total
        before, shell = self._shell(target, side)
        # Only values are sorted: the answer is one of those equal to the value found, and these are in order of id.
        members = self._logits[shell]
        values = np.sort(members)[::-1]
        weights = self._weigh(values, np.empty_like(values))
        cumulative = before + weights.cumsum(dtype=np.float64)
        rank = min(int(np.searchsorted(cumulative, target, side)), len(shell) - 1)
        first = int(np.searchsorted(-values, -values[rank], "left"))
        return int(shell[np.flatnonzero(members == values[rank])[rank - first]])

    def _shell(self, target: float, side: str) -> tuple[float, Ids]:
        """The candidates between two bounds on the logit that hold the answer, and the weight of all above them. The
        lower bound goes down from the peak in doubling steps, until enough weight is above it."""
        before, upper, width = 0.0, np.float32(np.inf), np.float32(8.0)
        while True:
            lower = self._peak - width * self._temperature
            above = np.flatnonzero(self._logits >= lower)
            mass = float(self._weights[above].sum(dtype=np.float64))
            if mass > target or (mass == target and side == "left"):
                return before, above[self._logits[above] < upper]
            before, upper, width = mass, lower, np.float32(2.0) * width

    def _weigh(self, logits: Float32, out: Float32) -> Float32:
        np.subtract(logits, self._peak, out=out)
        np.divide(out, self._temperature, out=out)
        return np.exp(out, out=out)
