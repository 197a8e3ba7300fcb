"""What a step of the torch decoder computes and touches, on small random models."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import ContractViolation, ExecutionMemoryExceeded, InvalidOption
from engine_actor.memory.layout import PoolGeometry
from engine_actor.options import SamplingParams
from engine_actor.sampling.sample_row import SampleRow
from kernels import native
from tests.support import tiny_models
from tests.support.engine_view import model_of
from tests.support.gguf_writing import write_gguf
from tests.support.packed import Row, pack, run_in_chunks

DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "gemma3", "mistral_window", "qwen3")
    return {name: tiny_models.save(tiny_models.build(name), tmp_path_factory.mktemp(name)) for name in names}


def _load(folder: Path, dtype: str = "float32", num_blocks: int = 40, block_size: int = 16) -> TorchDecoder:
    decoder = TorchDecoder.load(folder, dtype=dtype, device="cpu")
    decoder.allocate(PoolGeometry(num_blocks, block_size))
    return decoder


def _tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(tiny_models.VOCAB), k=count)


def _caches(decoder: TorchDecoder) -> list[torch.Tensor]:
    layers = model_of(decoder).layers
    return [cache for layer in layers for cache in (layer.attention.key_cache, layer.attention.value_cache)]


def test_the_manifest_says_what_the_engine_needs(folders: dict[str, Path]) -> None:
    manifest = TorchDecoder.load(folders["llama"], dtype="bfloat16", device="cpu").manifest
    assert (manifest.vocab_size, manifest.context_length, manifest.eos_token_ids) == (256, 512, frozenset({7}))
    # 3 layers, keys and values, 16 positions, 2 heads of 16 numbers of 2 bytes.
    assert manifest.paged.block_bytes(16) == 3 * 2 * 16 * 2 * 16 * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_leave_as_keys_and_values_of_each_layer_in_turn(folders: dict[str, Path], dtype: str) -> None:
    decoder = _load(folders["llama"], dtype, num_blocks=4, block_size=4)
    decoder.forward(pack([Row(_tokens(7), 0, [3, 1])]))
    content = decoder.read_blocks([3, 1])
    assert content.shape == (6, 2, 4, 2, 16) and content.dtype == ("uint16" if dtype == "bfloat16" else "float32")
    for part, cache in zip(content, _caches(decoder), strict=True):
        assert part.tobytes() == cache[[3, 1]].view(torch.uint8).numpy().tobytes()
    decoder.write_blocks([2], content[:, 1:])
    for cache in _caches(decoder):
        assert torch.equal(cache[2], cache[1])


def test_a_cache_is_that_of_its_weights_its_configuration_and_its_type(tmp_path: Path) -> None:
    def identity(name: str, dtype: str = "float32", change: str = "", **config: float) -> str:
        model = tiny_models.build("llama", **config)
        if change:
            model.get_parameter(change).data[:, 5] *= 1.01
        folder = tiny_models.save(model, tmp_path / name)
        return TorchDecoder.load(folder, dtype=dtype, device="cpu").manifest.cache_identity

    others = [
        identity("b", dtype="bfloat16"),
        identity("c", change="model.layers.1.mlp.down_proj.weight"),
        identity("d", change="model.embed_tokens.weight"),
        identity("e", rms_norm_eps=1e-3),
    ]
    same = identity("a")
    assert identity("f") == same
    assert len({same, *others}) == 5


def test_logits_come_for_the_wanted_rows_only_and_in_their_order(folders: dict[str, Path]) -> None:
    decoder = _load(folders["llama"])
    rows = [Row(_tokens(9, 1), 0, [1]), Row(_tokens(20, 2), 0, [2, 3])]
    everything = decoder.forward(pack(rows))
    some = decoder.forward(pack(rows, [28, 8, 0]))
    torch.testing.assert_close(some, everything[[28, 8, 0]], rtol=0, atol=1e-4)
    backwards = decoder.forward(pack(rows, list(reversed(range(29)))))
    torch.testing.assert_close(backwards, everything.flip(0), rtol=0, atol=1e-4)
    none = decoder.forward(pack(rows, []))
    assert none.shape == (0, 256) and none.dtype == torch.float32


def test_a_step_writes_its_own_positions_and_nothing_else(folders: dict[str, Path]) -> None:
    decoder = _load(folders["llama"], num_blocks=8, block_size=4)
    decoder.forward(pack([Row(_tokens(6, 1), 0, [3, 5])]))
    before = [cache.clone() for cache in _caches(decoder)]
    decoder.forward(pack([Row(_tokens(3, 2), 6, [3, 5, 2]), Row(_tokens(2, 3), 0, [7, 6])]))
    written = {(5, 2), (5, 3), (2, 0), (7, 0), (7, 1)}
    for old, new in zip(before, _caches(decoder), strict=True):
        changed = {(int(b), int(s)) for b, s in (old != new).any(-1).any(-1).nonzero()}
        assert changed == written


def test_what_lies_in_unused_positions_cannot_reach_the_logits(folders: dict[str, Path]) -> None:
    for family in ("llama", "mistral_window"):
        clean, dirty = _load(folders[family], block_size=4), _load(folders[family], block_size=4)
        with torch.inference_mode():
            for cache in _caches(dirty):
                cache.fill_(float("nan"))
        tokens = _tokens(23, 4)
        expected = run_in_chunks(clean, tokens, 10, [1, 2, 3, 4, 5, 6])
        assert torch.equal(run_in_chunks(dirty, tokens, 10, [1, 2, 3, 4, 5, 6]), expected)


def test_copies_come_before_the_step_and_leave_their_source_alone(folders: dict[str, Path]) -> None:
    decoder = _load(folders["llama"], block_size=8)
    shared, left, right = _tokens(12, 1), _tokens(5, 2), _tokens(5, 3)
    decoder.forward(pack([Row(shared, 0, [1, 2])]))
    # Block 1 is full and shared; block 2 is the half-full tail that the fork copies to block 9.
    both = decoder.forward(pack([Row(left, 12, [1, 2, 3]), Row(right, 12, [1, 9, 4])], copies=[(2, 9)]))
    for found, own in ((both[:5], left), (both[5:], right)):
        alone = run_in_chunks(_load(folders["llama"], block_size=8), shared + own, 64, [1, 2, 3])
        torch.testing.assert_close(found, alone[12:], rtol=0, atol=1e-4)


def test_the_pools_are_allocated_once_and_stay_where_they_are(folders: dict[str, Path]) -> None:
    decoder = _load(folders["llama"])
    places = [cache.data_ptr() for cache in _caches(decoder)]
    assert len(set(places)) == 6 and all(place % 64 == 0 for place in places)
    run_in_chunks(decoder, _tokens(40), 7, [1, 2, 3])
    assert [cache.data_ptr() for cache in _caches(decoder)] == places
    with pytest.raises(ContractViolation, match="allocated already"):
        decoder.allocate(PoolGeometry(4, 16))
    with pytest.raises(ContractViolation, match="before allocate"):
        TorchDecoder.load(folders["llama"], device="cpu").forward(pack([Row([1], 0, [1])]))


@pytest.mark.parametrize(
    "run_out",
    [
        lambda step: torch.empty(1 << 55, dtype=torch.uint8),
        lambda step: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    ],
    ids=["cpu", "cuda"],
)
def test_running_out_of_memory_is_told_apart_and_the_next_step_works(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, run_out: Callable[[object], torch.Tensor]
) -> None:
    decoder = _load(folders["llama"])
    step = pack([Row(_tokens(5), 0, [1])])
    expected = decoder.forward(step)
    with monkeypatch.context() as patch:
        patch.setattr(type(model_of(decoder)), "__call__", lambda model, tensors: run_out(tensors))
        with pytest.raises(ExecutionMemoryExceeded, match="a step of 5 tokens"):
            decoder.launch(step, [SampleRow(SamplingParams(), 5)])
    assert torch.equal(decoder.forward(step), expected)


def test_other_failures_of_a_step_are_not_taken_for_want_of_memory(folders: dict[str, Path]) -> None:
    decoder = _load(folders["llama"])
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        decoder.launch(pack([Row([tiny_models.VOCAB + 5], 0, [1])]), [SampleRow(SamplingParams(), 1)])


@pytest.mark.parametrize(("name", "value"), [("dtype", "float16"), ("device", "tpu"), ("weights", "int8")])
def test_bad_choices_are_refused_by_name(folders: dict[str, Path], name: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=f"{name} must be .* not '{value}'"):
        TorchDecoder.load(folders["llama"], **{name: value})  # type: ignore[arg-type]


def test_stored_weights_are_refused_or_expanded_where_they_cannot_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), Kind.Q8_0)
    small = TorchDecoder.load(path, device="cpu", weights="auto").weight_bytes
    for available, device, wanted in [(False, "cpu", "no native kernels: no compiler"), (True, "cuda", "on cuda")]:
        with monkeypatch.context() as patch:
            patch.setattr(native, "status", lambda available=available: (available, "no compiler"))
            patch.setattr(torch.cuda, "is_available", lambda: True)
            with pytest.raises(InvalidOption, match=f"weights must be 'auto' or 'expanded' .*{wanted}, not 'stored'"):
                TorchDecoder.load(path, device=device, weights="stored")
            if device == "cpu":
                large = TorchDecoder.load(path, device="cpu", weights="auto").weight_bytes
                assert large > small * 1.5 or native.shared_object() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral_window", "qwen3"])
def test_a_row_has_the_same_bits_in_any_company_chunk_and_block(
    folders: dict[str, Path], family: str, dtype: str
) -> None:
    tokens = _tokens(150, 9)
    decoder = _load(folders[family], dtype)
    assert decoder.row_invariant
    whole = run_in_chunks(decoder, tokens, 512, range(1, 11))
    assert whole.std() > 0.5
    for chunk in (1, 7, 16):
        assert torch.equal(run_in_chunks(decoder, tokens, chunk, range(11, 21)), whole), f"chunks of {chunk}"
    for block_size in (4, 32):
        other = _load(folders[family], dtype, num_blocks=160 // block_size + 2, block_size=block_size)
        blocks = list(range(160 // block_size, -1, -1))
        assert torch.equal(run_in_chunks(other, tokens, 37, blocks), whole), f"blocks of {block_size}"

    company = [Row(_tokens(length, length), 0, [20 + i]) for i, length in enumerate((1, 5, 16, 2, 9))]
    ours = Row(tokens[:33], 0, range(1, 11))
    mixed = decoder.forward(pack([*company[:3], ours, *company[3:]]))[22:55]
    assert torch.equal(mixed, whole[:33]), "in a batch of prompts"
    decodes = [Row(_tokens(1, 50 + i), 0, [20 + i]) for i in range(12)]
    for place, position in ((0, 33), (5, 34), (12, 35)):
        row = Row(tokens[position : position + 1], position, range(1, 11))
        logits = decoder.forward(pack([*decodes[:place], row, *decodes[place:]]))
        assert torch.equal(logits[place], whole[position]), "in a batch of decodes"
