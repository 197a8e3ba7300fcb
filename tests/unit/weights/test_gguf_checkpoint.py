"""GGUF files: the same model as its safetensors twin, every block format, and damage said clearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.memory.layout import PoolGeometry
from engine_actor.weights.gguf_file import GgufFile
from engine_actor.weights.opening import open_checkpoint
from engine_actor.weights.rope_scaling import llama3_divisors
from tests.support import tiny_models
from tests.support.gguf_writing import write_gguf
from tests.support.packed import run_in_chunks

QUANTIZED = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
TOKENS = list(range(3, 200, 5))


def _logits(path: Path, weights: str = "auto") -> torch.Tensor:
    decoder = TorchDecoder.load(path, dtype="float32", device="cpu", weights=weights)
    decoder.allocate(PoolGeometry(4, 16))
    return run_in_chunks(decoder, TOKENS, 17, [1, 3, 2])


def _rounded_as(model: torch.nn.Module, kind: Kind) -> None:
    """Every matrix takes the values that a file of this block format can hold."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                blocks = quantize(parameter.detach().numpy(), kind)
                parameter.copy_(torch.from_numpy(dequantize(blocks, kind).reshape(parameter.shape).copy()))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_a_gguf_file_gives_the_logits_of_the_safetensors_model_of_the_same_values(kind: Kind, tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    gguf = write_gguf(tmp_path / "model.gguf", model, kind)
    _rounded_as(model, kind)
    folder = tiny_models.save(model, tmp_path / "folder")
    expected = _logits(folder)
    assert expected.std() > 0.5
    for weights in ("auto", "expanded"):
        assert torch.equal(_logits(gguf, weights), expected)


@pytest.mark.parametrize("family", ["llama", "llama_biases", "gemma3"])
@pytest.mark.parametrize(
    "others",
    [
        {"attn_v": Kind.Q8_0},
        {"attn_k": Kind.F16, "ffn_up": Kind.Q5_0},
        {"attn_q": Kind.Q5_1, "attn_k": Kind.Q4_0, "attn_v": Kind.BF16, "token_embd": Kind.F16, "output": Kind.Q8_0},
    ],
    ids=["values", "one left out", "all differ"],
)
def test_projections_of_different_kinds_still_give_the_logits_of_their_values(
    family: str, others: dict[str, Kind], tmp_path: Path
) -> None:
    architecture = "gemma3" if family == "gemma3" else "llama"
    untied = "output" in others and family == "llama"
    model = tiny_models.build(family, **({"tie_word_embeddings": False} if untied else {}))
    gguf = write_gguf(tmp_path / "model.gguf", model, Kind.Q4_1, architecture=architecture, others=others)
    expected = _logits(gguf, "expanded")
    assert expected.std() > 0.5
    assert torch.equal(_logits(gguf, "auto"), expected)


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("mistral", "llama", {}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        # A whole pattern of local and global layers; these files do not carry the scale of the queries.
        ("gemma3", "gemma3", {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 16}),
    ],
)
def test_every_family_is_read_as_transformers_runs_it(
    family: str, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_models.build(family, **changes)
    gguf = write_gguf(tmp_path / "model.gguf", model, Kind.F32, architecture=architecture)
    expected = tiny_models.reference_logits(model, TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(_logits(gguf), expected, rtol=0, atol=1e-4)


def test_an_output_projection_of_its_own_and_rope_divisors_are_read(tmp_path: Path) -> None:
    model = tiny_models.build("llama3_rope", tie_word_embeddings=False)
    rope = tiny_models.LLAMA3_ROPE
    divisors = llama3_divisors(
        16,
        rope["rope_theta"],
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    assert len(set(divisors)) > 2, "all three regions of the rule should be seen"
    gguf = write_gguf(tmp_path / "model.gguf", model, Kind.F32, rope_divisors=np.array(divisors))
    torch.testing.assert_close(_logits(gguf), tiny_models.reference_logits(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0, Kind.Q5_0], ids=lambda kind: kind.name)
def test_blocks_expand_to_the_values_of_the_library(kind: Kind, tmp_path: Path) -> None:
    rows, columns = 1030, 512  # two whole chunks and a rest
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(5).integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    # Every byte pair could be a block's float16 scale: keep the exponents small, so that all values are finite.
    raw &= 0xBB
    raw = raw.reshape(rows, -1)
    path = tmp_path / "model.gguf"
    model = tiny_models.build("llama")
    write_gguf(path, model, Kind.F32)
    writer = GGUFWriter(path, "llama")
    for key, value in GgufFile(path).fields.items():
        if key.startswith("llama.") and isinstance(value, int):
            writer.add_uint32(key, value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = open_checkpoint(path).tensor("model.embed_tokens.weight", (rows, columns))
    expected = torch.from_numpy(dequantize(raw, kind).copy())
    assert expected.isfinite().all() and len(set(expected.flatten().tolist())) > 100
    assert torch.equal(found, expected)


def test_the_configuration_and_the_end_tokens_come_from_the_header(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), Kind.Q8_0)
    config = open_checkpoint(path).config
    assert (config.layers, config.heads, config.kv_heads, config.head_size) == (3, 4, 2, 16)
    assert (config.vocab_size, config.context_length, config.tie_embeddings) == (tiny_models.VOCAB, 512, True)
    assert config.eos_token_ids == {5, 6}


def test_progress_reaches_the_number_of_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), Kind.Q8_0)
    seen: list[tuple[int, int]] = []
    TorchDecoder.load(path, device="cpu", progress=lambda done, total: seen.append((done, total)))
    total = 2 + 3 * 9
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    path = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        TorchDecoder.load(path, device="cpu")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), Kind.Q8_0, architecture="mamba")
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported"):
        open_checkpoint(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_models.build("llama"), Kind.Q8_0).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 4000, 37), *range(4000, len(whole), 4999), len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(UnreadableModel):
            open_checkpoint(cut)


def test_damaged_headers_never_escape_as_anything_but_a_model_error(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", tiny_models.build("llama"), Kind.Q8_0).read_bytes())
    path, random = tmp_path / "damaged.gguf", np.random.default_rng(7)
    refused = 0
    for _ in range(300):
        damaged = whole.copy()
        for place in random.integers(0, 6000, 4):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except (UnreadableModel, UnsupportedModel):
            refused += 1
    assert refused > 20


def test_something_else_is_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all" * 10)
    with pytest.raises(UnreadableModel, match="does not start with 'GGUF'"):
        open_checkpoint(path)
    with pytest.raises(UnreadableModel, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")
