"""The torch decoder on the demo model: against transformers, bfloat16 against float32, and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.layout import PoolGeometry
from kernels import native
from serve_app.text.tokenizer import load_tokenizer
from tests.support.packed import Row, pack, run_in_chunks
from tests.support.prose import PROSE

TEXT_TOKENS = 500


@pytest.fixture(scope="module")
def text(smollm2_path: Path) -> list[int]:
    tokens = load_tokenizer(smollm2_path).encode(PROSE, special_tokens=False)
    assert len(tokens) >= TEXT_TOKENS
    return tokens[:TEXT_TOKENS]


@pytest.fixture(scope="module")
def expected(smollm2_path: Path, text: list[int]) -> torch.Tensor:
    """transformers' float32 logits of the text, from the same file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0]
    return logits


def _load(path: Path, dtype: str, num_blocks: int = 80, block_size: int = 16, weights: str = "auto") -> TorchDecoder:
    decoder = TorchDecoder.load(path, dtype=dtype, device="cpu", weights=weights)
    decoder.allocate(PoolGeometry(num_blocks, block_size))
    return decoder


FORMS = [("bfloat16", "auto"), ("bfloat16", "expanded"), ("float32", "auto"), ("float32", "expanded")]


@pytest.fixture(scope="module", params=FORMS, ids=" ".join)
def either(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[tuple[tuple[str, str], TorchDecoder]]:
    dtype, weights = request.param
    yield request.param, _load(smollm2_path, dtype, weights=weights)


def test_weights_as_stored_give_the_logits_of_float32_ones_bit_for_bit(smollm2_path: Path, text: list[int]) -> None:
    """Kept in 4 and 8 bits they are the same numbers, in the same order of sums."""
    stored, expanded = (_load(smollm2_path, "float32", weights=weights) for weights in ("auto", "expanded"))
    if native.shared_object() is not None:
        assert stored.weight_bytes < 100 * 2**20 and expanded.weight_bytes > 6 * stored.weight_bytes
    found, expected = (run_in_chunks(decoder, text, 128, range(1, 40)) for decoder in (stored, expanded))
    assert torch.equal(found, expected)


def test_a_mixed_step_has_the_logits_of_transformers(
    smollm2_path: Path, text: list[int], expected: torch.Tensor
) -> None:
    decoder = _load(smollm2_path, "float32")
    first, second, third = text[:200], text[:77], text[:40]
    blocks = [range(1, 20), range(20, 30), range(40, 44)]
    decoder.forward(pack([Row(first[:199], 0, blocks[0]), Row(second[:30], 0, blocks[1])], []))
    rows = [Row(first[199:], 199, blocks[0]), Row(second[30:], 30, blocks[1]), Row(third, 0, blocks[2])]
    wanted = torch.cat([expected[199:200], expected[30:77], expected[:40]])
    torch.testing.assert_close(decoder.forward(pack(rows)), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("weights", ["auto", "expanded"])
def test_bfloat16_stays_close_to_float32_on_real_text(
    smollm2_path: Path, text: list[int], expected: torch.Tensor, weights: str
) -> None:
    found = run_in_chunks(_load(smollm2_path, "bfloat16", weights=weights), text, 128, range(1, 40)).log_softmax(-1)
    reference = expected.log_softmax(-1)
    divergence = (reference.exp() * (reference - found)).sum(-1).mean()
    agreement = (found.argmax(-1) == reference.argmax(-1)).float().mean()
    assert divergence <= 2e-3
    assert agreement >= 0.98


def test_chunks_and_company_do_not_change_a_bit(either: tuple[tuple[str, str], TorchDecoder], text: list[int]) -> None:
    _, decoder = either
    tokens = text[:80]
    assert decoder.row_invariant
    whole = run_in_chunks(decoder, tokens, 512, range(1, 8))
    for chunk in (1, 7, 16):
        assert torch.equal(run_in_chunks(decoder, tokens, chunk, range(8, 15)), whole), f"chunks of {chunk}"

    # A prompt of 31 next to ours, then 32 decodes of which ours is one.
    pair = decoder.forward(pack([Row(text[200:231], 0, [20, 21]), Row(tokens[:60], 0, range(1, 8))]))
    assert torch.equal(pair[31:], whole[:60]), "in a batch of prompts"
    others = [Row(text[300 + i : 301 + i], 0, [30 + i]) for i in range(31)]
    batch = decoder.forward(pack([*others[:17], Row(tokens[60:61], 60, range(1, 8)), *others[17:]]))
    assert torch.equal(batch[17], whole[60]), "in a batch of decodes"


def test_the_size_of_a_block_does_not_change_a_bit(
    either: tuple[tuple[str, str], TorchDecoder], smollm2_path: Path, text: list[int]
) -> None:
    (dtype, weights), decoder = either
    tokens = text[:80]
    whole = run_in_chunks(decoder, tokens, 512, range(1, 8))
    for block_size in (4, 32):
        other = _load(smollm2_path, dtype, 40, block_size, weights)
        assert torch.equal(run_in_chunks(other, tokens, 33, range(30, 0, -1)), whole), f"blocks of {block_size}"
