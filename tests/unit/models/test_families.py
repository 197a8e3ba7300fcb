"""Every family's logits against transformers, from the same folder, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.layout import PoolGeometry
from tests.support import tiny_models
from tests.support.packed import Row, pack

TOLERANCE = 1e-4


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(tiny_models.VOCAB), k=count)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_mixed_step_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    decoder = TorchDecoder.load(tiny_models.save(model, tmp_path), dtype="float32", device="cpu")
    decoder.allocate(PoolGeometry(num_blocks=32, block_size=8))
    long, middle, fresh = _tokens(91, 1), _tokens(50, 2), _tokens(21, 3)
    blocks = [[3, 1, 4, 15, 9, 2, 6, 5, 30, 8, 7, 31], [20, 21, 19, 22, 18, 23, 17], [12, 10, 13]]

    before = decoder.forward(pack([Row(long[:90], 0, blocks[0]), Row(middle[:33], 0, blocks[1])]))
    mixed = decoder.forward(
        pack([Row(long[90:], 90, blocks[0]), Row(middle[33:], 33, blocks[1]), Row(fresh, 0, blocks[2])])
    )

    expected = [tiny_models.reference_logits(model, tokens) for tokens in (long, middle, fresh)]
    assert expected[0].std() > 0.5, "logits so small that any answer would pass"
    torch.testing.assert_close(before, torch.cat([expected[0][:90], expected[1][:33]]), rtol=0, atol=TOLERANCE)
    mixed_expected = torch.cat([expected[0][90:], expected[1][33:], expected[2]])
    torch.testing.assert_close(mixed, mixed_expected, rtol=0, atol=TOLERANCE)


def test_weights_spread_over_several_files_are_the_same_model(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    folder = tiny_models.save(model, tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    decoder = TorchDecoder.load(folder, dtype="float32", device="cpu")
    decoder.allocate(PoolGeometry(4, 16))
    tokens = _tokens(30, 4)
    found = decoder.forward(pack([Row(tokens, 0, [2, 0])]))
    torch.testing.assert_close(found, tiny_models.reference_logits(model, tokens), rtol=0, atol=TOLERANCE)
