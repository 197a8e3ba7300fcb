"""Tokens chosen in main memory: for decoders that give logits and have no sampler of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine_actor.decoding.decoder import PackedStep, SampledStep
from engine_actor.errors import ExecutionMemoryExceeded, SamplingFailed
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.sampling.logprobs import TokenLogprob, logprob_of
from engine_actor.sampling.sample_row import SampleRow

Float32 = NDArray[np.float32]
Forward = Callable[[PackedStep], Float32]
"""Logits of a step's `logits_rows`: float32 [rows, vocab] in main memory."""


class HostSampler:
    def __init__(self) -> None:
        self._sampler = BatchedSampler()

    def launch(self, forward: Forward, step: PackedStep, rows: Sequence[SampleRow]) -> HostLaunched:
        """Runs the model; `collect` chooses."""
        started = time.perf_counter()
        logits = forward(step)
        return HostLaunched(self._sampler, logits, rows, time.perf_counter() - started)


class HostLaunched:
    """Implements `Launched`: of a model that has run."""

    def __init__(
        self, sampler: BatchedSampler, logits: Float32, rows: Sequence[SampleRow], decoder_seconds: float
    ) -> None:
        self._sampler, self._logits, self._rows = sampler, logits, rows
        self._decoder_seconds = decoder_seconds

    def collect(self) -> SampledStep:
        """Raises SamplingFailed, MemoryError or ExecutionMemoryExceeded."""
        try:
            tokens = self._sampler.sample(self._logits, self._rows)
            return SampledStep(tokens, self._logprobs(tokens), self._decoder_seconds)
        except (MemoryError, ExecutionMemoryExceeded):
            raise
        except Exception as error:
            raise SamplingFailed(f"{type(error).__name__}: {error}") from error

    def _logprobs(self, tokens: Sequence[int | None]) -> Sequence[TokenLogprob | None]:
        if all(row.logprobs is None for row in self._rows):  # nearly always
            return ()
        return [
            None if row.logprobs is None or token is None else logprob_of(logits, token, row.logprobs)
            for row, token, logits in zip(self._rows, tokens, self._logits, strict=True)
        ]
