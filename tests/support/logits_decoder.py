"""Decoders of tests that compute logits, and leave the choice of tokens to the host sampler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from engine_actor.decoding.decoder import Decoder, Launched, PackedStep
from engine_actor.decoding.failures import step_failures
from engine_actor.decoding.host_sampler import HostSampler
from engine_actor.sampling.sample_row import SampleRow


class LogitsDecoder(Decoder, Protocol):
    """A decoder whose logits can be asked for, in a tensor or an array: TorchDecoder, and the doubles of tests."""

    def forward(self, step: PackedStep) -> Any:
        """float32 [len(step.logits_rows), vocab_size]."""
        ...


class HostSampled:
    """Base of doubles, which have `forward` alone."""

    @cached_property
    def _host_sampler(self) -> HostSampler:
        return HostSampler()

    def launch(self, step: PackedStep, rows: Sequence[SampleRow]) -> Launched:
        with step_failures(len(step.input_ids)):
            return self._host_sampler.launch(self.forward, step, rows)

    def forward(self, step: PackedStep) -> Any:
        raise NotImplementedError
