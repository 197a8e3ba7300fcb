"""What every decoder must do, whatever is behind it (the protocol in engine_actor/decoding/decoder.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.layout import PoolGeometry
from engine_actor.options import SamplingParams
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.sampling.logprobs import logprob_of
from engine_actor.sampling.sample_row import RowContext, SampleRow
from tests.support import tiny_models
from tests.support.doubles import ForcedDecoder, MixingDecoder, RecurrentMixingDecoder, SyntheticDecoder
from tests.support.logits_decoder import LogitsDecoder
from tests.support.packed import STATE_SLOTS, Row, pack

BLOCK = 4
SEQUENCE = [5, 9, 13, 20, 2, 11, 30, 8, 17, 6, 3]


def _torch(family: str, dtype: str) -> Callable[[Path], LogitsDecoder]:
    def build(folder: Path) -> LogitsDecoder:
        tiny_models.build(family).save_pretrained(folder)
        return TorchDecoder.load(folder, dtype=dtype, device="cpu")

    return build


DECODERS: dict[str, Callable[[Path], LogitsDecoder]] = {
    "synthetic": lambda _: SyntheticDecoder(),
    "forced": lambda _: ForcedDecoder(),
    "mixing": lambda _: MixingDecoder(),
    "recurrent": lambda _: RecurrentMixingDecoder(),
    "torch llama bfloat16": _torch("llama", "bfloat16"),
    "torch qwen3 float32": _torch("qwen3", "float32"),
    "torch gemma3 float32": _torch("gemma3", "float32"),
}


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> LogitsDecoder:
    made = DECODERS[request.param](tmp_path)
    made.allocate(PoolGeometry(32, BLOCK, STATE_SLOTS if made.manifest.state_bytes else 0))
    return made


def run(
    decoder: LogitsDecoder,
    rows: Sequence[Row],
    wanted: Sequence[int] | None = None,
    copies: Sequence[tuple[int, int]] = (),
) -> np.ndarray:
    logits = decoder.forward(pack(rows, wanted, copies, states=decoder.manifest.state_bytes > 0))
    array = logits.numpy() if isinstance(logits, torch.Tensor) else logits
    assert array.dtype == np.float32
    assert array.shape[1] == decoder.manifest.vocab_size
    return np.array(array)


def whole(decoder: LogitsDecoder) -> np.ndarray:
    return run(decoder, [Row(SEQUENCE, 0, [1, 2, 3])])


def test_logits_come_in_the_order_in_which_they_were_asked_for(decoder: LogitsDecoder) -> None:
    expected = whole(decoder)
    assert np.array_equal(run(decoder, [Row(SEQUENCE, 0, [1, 2, 3])], [10, 0, 4]), expected[[10, 0, 4]])


def test_a_launched_step_gives_the_token_and_the_logprobs_of_each_wanted_row(decoder: LogitsDecoder) -> None:
    logits = whole(decoder)[[10, 0, 4]]
    rows = [
        SampleRow(SamplingParams(), 11, logprobs=2),
        SampleRow(SamplingParams(1.0, seed=7), 1),
        SampleRow(
            SamplingParams(0.7, top_p=0.9, seed=8), 5, RowContext([], 0, frozenset({int(logits[2].argmax())}), None), 0
        ),
    ]
    step = pack([Row(SEQUENCE, 0, [1, 2, 3])], [10, 0, 4], states=decoder.manifest.state_bytes > 0)
    sampled = decoder.launch(step, rows).collect()
    assert sampled.tokens == BatchedSampler().sample(logits, rows)
    tokens = [token for token in sampled.tokens if token is not None]
    assert sampled.logprobs == [logprob_of(logits[0], tokens[0], 2), None, logprob_of(logits[2], tokens[2], 0)]
    assert sampled.decoder_seconds > 0


def test_a_step_that_chooses_no_token_still_writes(decoder: LogitsDecoder) -> None:
    expected = whole(decoder)
    states = decoder.manifest.state_bytes > 0
    sampled = decoder.launch(pack([Row(SEQUENCE[:6], 0, [4, 5, 6])], [], states=states), []).collect()
    assert (list(sampled.tokens), list(sampled.logprobs)) == ([], [])
    assert np.allclose(run(decoder, [Row(SEQUENCE[6:], 6, [4, 5, 6])]), expected[6:], atol=1e-4)


def test_a_step_that_wants_no_logits_returns_none_and_still_writes(decoder: LogitsDecoder) -> None:
    expected = whole(decoder)
    assert run(decoder, [Row(SEQUENCE[:6], 0, [4, 5, 6])], []).shape == (0, decoder.manifest.vocab_size)
    assert np.allclose(run(decoder, [Row(SEQUENCE[6:], 6, [4, 5, 6])]), expected[6:], atol=1e-4)


def test_rows_are_the_same_in_any_company_chunk_and_place(decoder: LogitsDecoder) -> None:
    if not decoder.row_invariant:
        pytest.skip("this decoder does not claim it on this machine")
    expected = whole(decoder)
    other = [7, 7, 7, 12, 25]
    for chunk in (1, 2, 5, 11):
        blocks, found = [9, 20, 4], []
        for start in range(0, len(SEQUENCE), chunk):
            part = SEQUENCE[start : start + chunk]
            rows = [Row(other, 0, [14, 15]), Row(part, start, blocks), Row(other[:2], 0, [16])]
            found.append(run(decoder, rows)[len(other) : len(other) + len(part)])
        assert np.array_equal(np.concatenate(found), expected), f"chunks of {chunk}"


def test_a_step_writes_only_into_the_blocks_that_it_names(decoder: LogitsDecoder) -> None:
    expected = whole(decoder)
    run(decoder, [Row(SEQUENCE[:7], 0, [1, 2])], [])
    run(decoder, [Row([3] * 12, 0, [5, 6, 7]), Row([4] * 9, 0, [8, 9, 10])], [])
    assert np.allclose(run(decoder, [Row(SEQUENCE[7:], 7, [1, 2, 3])]), expected[7:], atol=1e-4)


def test_positions_that_were_never_committed_are_written_again(decoder: LogitsDecoder) -> None:
    """After a rollback the same positions are simply written anew."""
    expected = whole(decoder)
    run(decoder, [Row(SEQUENCE[:5], 0, [1, 2, 3])], [])
    run(decoder, [Row([31, 31, 31, 31], 5, [1, 2, 3])], [])
    assert np.allclose(run(decoder, [Row(SEQUENCE[5:], 5, [1, 2, 3])]), expected[5:], atol=1e-4)


def test_blocks_are_copied_before_anything_is_written(decoder: LogitsDecoder) -> None:
    expected = whole(decoder)
    run(decoder, [Row(SEQUENCE[:6], 0, [1, 2])], [])
    # One row goes on in the source block while another starts from its copy, in one step.
    rows = [Row([29, 28], 6, [1, 2]), Row(SEQUENCE[6:], 6, [1, 7, 8])]
    assert np.allclose(run(decoder, rows, copies=[(2, 7)])[2:], expected[6:], atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_goes_on_from_what_the_blocks_of_another_hold(name: str, tmp_path: Path) -> None:
    here, there = (DECODERS[name](tmp_path / place) for place in ("here", "there"))
    assert here.manifest.blocks_can_move == (name != "recurrent")
    if not here.manifest.blocks_can_move:
        return
    assert here.manifest.cache_identity == there.manifest.cache_identity
    for made in (here, there):
        made.allocate(PoolGeometry(32, BLOCK))
    expected = whole(here)
    run(there, [Row([3] * 12, 0, [9, 4, 7]), Row(SEQUENCE[:5], 0, [11, 12])], [])
    content = here.read_blocks([1, 2])
    assert content.shape[1] == 2
    run(here, [Row([31] * 8, 0, [1, 2])], [])  # it was a copy
    content.flags.writeable = False
    there.write_blocks([9, 4], content)
    assert np.array_equal(there.read_blocks([4, 9]), content[:, ::-1])
    found = run(there, [Row(SEQUENCE[6:], 6, [9, 4, 7]), Row(SEQUENCE[5:], 5, [11, 12, 13])])
    for rows in (expected[6:], expected[5:]):
        part, found = found[: len(rows)], found[len(rows) :]
        assert np.array_equal(part, rows) if here.row_invariant else np.allclose(part, rows, atol=1e-4)


def test_the_manifest_describes_the_pools(decoder: LogitsDecoder) -> None:
    paged = decoder.manifest.paged
    assert paged.layers == tuple(range(len(paged.layers)))
    per_position = 2 * len(paged.layers) * paged.kv_heads * paged.head_size * paged.element_bytes
    assert paged.block_bytes(BLOCK) == BLOCK * per_position
    assert all(0 <= token < decoder.manifest.vocab_size for token in decoder.manifest.eos_token_ids)
