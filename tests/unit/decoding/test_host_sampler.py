"""Tokens chosen in main memory, when the model has run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine_actor.decoding.failures import step_failures
from engine_actor.decoding.host_sampler import HostSampler
from engine_actor.errors import ExecutionMemoryExceeded, SamplingFailed
from engine_actor.options import SamplingParams
from engine_actor.sampling.sample_row import Bits, RowContext, SampleRow
from tests.support.packed import Row, pack

STEP = pack([Row([5], 0, [1])])
LOGITS = np.array([[1.0, 4.0, 2.0, 3.0]], np.float32)


def masked(mask: Callable[[], Bits | None]) -> list[SampleRow]:
    return [SampleRow(SamplingParams(), 1, RowContext([5], 0, mask=mask), logprobs=1)]


def test_a_mask_is_computed_once_and_after_the_model_has_run() -> None:
    order: list[str] = []

    def forward(_: object) -> np.ndarray:
        order.append("model")
        return LOGITS

    def mask() -> Bits:
        order.append("mask")
        return np.array([0b1100, 0, 0, 0], np.uint8)

    launched = HostSampler().launch(forward, STEP, masked(mask))
    assert order == ["model"]
    sampled = launched.collect()
    assert order == ["model", "mask"]
    assert sampled.tokens == [3]
    [logprob] = sampled.logprobs
    assert logprob is not None and (logprob.token, logprob.top[0][0]) == (3, 1)  # of the model, before any option


def test_a_row_without_a_finite_number_has_neither_token_nor_logprob() -> None:
    broken = np.full((1, 4), np.nan, np.float32)
    sampled = HostSampler().launch(lambda _: broken, STEP, [SampleRow(SamplingParams(), 1, logprobs=2)]).collect()
    assert (sampled.tokens, sampled.logprobs) == ([None], [None])


@pytest.mark.parametrize("error", [MemoryError("full"), ExecutionMemoryExceeded("full")])
def test_memory_that_runs_out_while_choosing_is_no_failure_of_sampling(error: Exception) -> None:
    def mask() -> Bits:
        raise error

    with pytest.raises(type(error), match="full"):
        HostSampler().launch(lambda _: LOGITS, STEP, masked(mask)).collect()


def test_any_other_failure_while_choosing_is_one_and_names_its_cause() -> None:
    def mask() -> Bits:
        raise KeyError("lost")

    with pytest.raises(SamplingFailed, match="KeyError: 'lost'") as raised:
        HostSampler().launch(lambda _: LOGITS, STEP, masked(mask)).collect()
    assert isinstance(raised.value.__cause__, KeyError)


class OutOfMemoryError(RuntimeError):
    """As torch and others name theirs."""


class DerivedError(OutOfMemoryError):
    pass


@pytest.mark.parity("F171")
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        DerivedError("device"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("Failed to allocate memory for requested buffer of size 2443129088"),
    ],
    ids=["python", "device", "torch's CPU", "ONNX Runtime"],
)
def test_memory_that_runs_out_is_known_by_its_kind_or_its_words(error: Exception) -> None:
    with (
        pytest.raises(ExecutionMemoryExceeded, match=f"a step of 7 tokens: {type(error).__name__}") as raised,
        step_failures(7),
    ):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("memory"), ValueError("x"), KeyboardInterrupt()])
def test_everything_else_passes_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, step_failures(7):
        raise error
    assert raised.value is error
