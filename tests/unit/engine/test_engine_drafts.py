"""Drafts over a real transformer: the rows that verify them say, bit for bit, what decoding says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine_actor.decoding.torch_decoder import MAX_DRAFT_TOKENS, TorchDecoder
from engine_actor.options import TurnOptions
from engine_actor.requests.record import RequestStatus
from tests.support import tiny_models
from tests.support.engines import engine_of

LIMIT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("llama"))


def answers(folder: Path, right: int | None, seed: int = 0) -> tuple[list[list[int]], int]:
    """Two answers, and the number of decoder calls; `right`: how many tokens of a proposal are correct."""
    decoder = TorchDecoder.load(folder, dtype="bfloat16", device="cpu")
    if not decoder.row_invariant:
        pytest.skip("this decoder's rows are not the same in any batch on this machine")
    assert decoder.manifest.max_draft_tokens == MAX_DRAFT_TOKENS
    engine = engine_of(decoder, num_blocks=32, block_size=4, max_length=64)
    rng = random.Random(seed)
    known = [] if right is None else answers(folder, None)[0]
    requests = [engine.create_request() for _ in range(2)]
    for request, length in zip(requests, (5, 9), strict=True):
        request.begin_turn([length + i for i in range(length)], TurnOptions(LIMIT, ignore_eos=True))
    while engine.has_pending_requests():
        for request, whole in zip(requests, known, strict=False):
            if request.status is RequestStatus.RUNNING:
                length = request.current_length
                request.set_draft_tokens(whole[length : length + (right or 0)] + rng.choices(range(256), k=2))
        engine.run(64)
        engine.check_integrity()
    return [request.tokens for request in requests], engine.metrics.committed_steps


@pytest.mark.parity("F307", "F297")
@pytest.mark.parametrize("right", [0, 1, 3, 9])
def test_drafts_change_the_number_of_steps_and_no_token(folder: Path, right: int) -> None:
    expected, steps = answers(folder, None)
    found, fewer = answers(folder, right, seed=right)
    assert found == expected and steps == LIMIT
    assert fewer <= 1 + -(-(LIMIT - 1) // (right + 1))
