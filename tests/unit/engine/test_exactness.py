"""Exact numerics are found by a probe, refused where they do not hold, and left to the probe by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_actor.core.exactness import settle_numerics
from engine_actor.decoding.decoder import Decoder, PackedStep
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import EngineUnhealthy, InvalidOption
from engine_actor.limits import EngineLimits, Numerics
from engine_actor.memory.layout import plan_pools
from engine_actor.options import TurnOptions
from tests.support.doubles import (
    MixingDecoder,
    RecurrentMixingDecoder,
    SyntheticDecoder,
    WindowedMixingDecoder,
    build_engine,
    run_out,
)
from tests.support.engines import engine_of

AUTO, EXACT, FAST = Numerics.AUTO, Numerics.EXACT, Numerics.FAST


class NoisyDecoder(MixingDecoder):
    """Adds to the first logit of a row what `noise` gives for the step's shape, as a sum in another order would."""

    def noise(self, rows: int, tokens: int) -> float:
        raise NotImplementedError

    def forward(self, step: PackedStep) -> np.ndarray:
        logits: np.ndarray = super().forward(step)
        logits[:, 0] += np.float32(self.noise(len(step.past_sequence_lengths), len(step.input_ids)))
        return logits


class CrowdedDecoder(NoisyDecoder):
    def noise(self, rows: int, tokens: int) -> float:
        return 1e-3 * (rows > 2)


class ChunkedDecoder(NoisyDecoder):
    def noise(self, rows: int, tokens: int) -> float:
        return 1e-3 * (1 < tokens < 8)


def settled(decoder: Decoder, numerics: Numerics) -> tuple[Numerics, str | None]:
    chosen = EngineLimits(numerics=numerics, block_size=4, max_batch_size=8, chunk_size=32)
    pools = plan_pools(decoder.manifest, chosen, num_blocks=128)
    decoder.allocate(pools.geometry)
    return settle_numerics(decoder, chosen, pools)


@pytest.mark.parametrize("numerics", [AUTO, EXACT])
@pytest.mark.parametrize("kind", [SyntheticDecoder, MixingDecoder, RecurrentMixingDecoder, WindowedMixingDecoder])
def test_a_decoder_whose_rows_are_the_same_in_any_company_is_exact(
    kind: type[SyntheticDecoder], numerics: Numerics
) -> None:
    assert settled(kind(), numerics) == (EXACT, None)


@pytest.mark.parametrize(
    ("kind", "difference"),
    [(CrowdedDecoder, "a row beside 2 others is not the same as alone"), (ChunkedDecoder, "a prompt in chunks")],
)
def test_a_difference_that_a_decoder_does_not_declare_is_found(kind: type[NoisyDecoder], difference: str) -> None:
    numerics, note = settled(kind(), AUTO)
    assert numerics is FAST
    assert note is not None and note.startswith(f"numerics fast, since {difference}") and "near ties" in note
    with pytest.raises(InvalidOption, match=f"numerics must be 'auto' or 'fast' on this machine: {difference}"):
        settled(kind(), EXACT)


def test_a_decoder_that_declares_a_difference_is_fast_without_a_probe() -> None:
    decoder = SyntheticDecoder()
    decoder.row_invariant = False
    numerics, note = settled(decoder, AUTO)
    assert numerics is FAST and note is not None and "depend on the batch" in note
    assert not decoder.steps


def test_what_is_chosen_to_be_fast_is_neither_probed_nor_remarked_upon() -> None:
    decoder = CrowdedDecoder()
    assert settled(decoder, FAST) == (FAST, None)
    assert not decoder.steps


@pytest.mark.parametrize("blocks", [1, 2, 3, 20, 40])
@pytest.mark.parametrize("limits", [{"max_batch_size": 1}, {"chunk_size": 0}, {"chunk_size": 1}, {"block_size": 16}])
def test_any_pool_can_be_probed(blocks: int, limits: dict[str, Any]) -> None:
    decoder = MixingDecoder()
    chosen = EngineLimits(**{"block_size": 4, "max_batch_size": 8, **limits})
    pools = plan_pools(decoder.manifest, chosen, num_blocks=blocks)
    decoder.allocate(pools.geometry)
    assert settle_numerics(decoder, chosen, pools) == (EXACT, None)


class FullDecoder(MixingDecoder):
    """Has no memory for its first `failures` steps."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def forward(self, step: PackedStep) -> np.ndarray:
        if len(self.steps) < self.failures:
            self.fail_before = lambda: MemoryError("full")
        return super().forward(step)


def test_a_step_of_the_probe_that_fails_is_tried_again_but_not_for_ever() -> None:
    assert settled(FullDecoder(3), AUTO) == (EXACT, None)
    with pytest.raises(EngineUnhealthy, match=r"makes no progress.*MemoryError: full"):
        settled(FullDecoder(10**9), AUTO)


def test_an_engine_is_as_new_after_its_decoder_was_probed() -> None:
    answers = []
    for probed in (False, True):
        decoder = MixingDecoder()
        engine = build_engine(decoder)
        if probed:
            settle_numerics(decoder, engine.limits, engine.pools)
        assert engine.stats()["blocks_free"] == 128 and engine.metrics.committed_steps == 0
        request = engine.create_request()
        request.begin_turn([4, 5, 6], TurnOptions(9))
        run_out(engine)
        answers.append(request.tokens)
    assert answers[0] == answers[1]


def test_the_real_model_is_exact_where_its_kernels_say_so(smollm2_path: Path) -> None:
    decoder = TorchDecoder.load(smollm2_path, device="cpu")
    engine = engine_of(decoder, num_blocks=32)
    numerics, note = settle_numerics(decoder, engine.limits, engine.pools)
    assert numerics is (EXACT if decoder.row_invariant else FAST)
    assert (note is None) == decoder.row_invariant
