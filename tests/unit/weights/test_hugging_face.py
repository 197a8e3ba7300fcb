"""Hugging Face folders: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.weights.opening import open_checkpoint
from tests.support import tiny_models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path / "model")


def _change_config(folder: Path, **changes: Any) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


def test_end_tokens_come_from_the_generation_configuration_first(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert open_checkpoint(folder).config.eos_token_ids == {7}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert open_checkpoint(folder).config.eos_token_ids == {9, 11}


def test_the_older_spelling_of_rope_scaling_is_the_same(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("llama3_rope"), tmp_path)
    new = open_checkpoint(folder).config
    scaling = tiny_models.LLAMA3_ROPE.copy()
    theta = scaling.pop("rope_theta")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": scaling}))
    assert len(set(new.rope.divisors)) > 2
    assert open_checkpoint(folder).config == new


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 3}, "heads must be a multiple of kv_heads, not 4 of 3"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
    ],
)
def test_what_cannot_run_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    _change_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(folder)


def test_a_head_size_that_no_kernel_takes_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("llama", head_dim=12), tmp_path)
    with pytest.raises(UnsupportedModel, match="head size 12"):
        TorchDecoder.load(folder, device="cpu")


def test_a_missing_tensor_and_a_wrong_shape_are_named(folder: Path) -> None:
    place = folder / "model.safetensors"
    tensors = load_file(place)
    name = "model.layers.2.self_attn.v_proj.weight"
    wrong = tensors | {name: torch.zeros(8, 64)}
    save_file(wrong, place)
    with pytest.raises(UnsupportedModel, match=r"v_proj.*\(8, 64\).*\(32, 64\)"):
        TorchDecoder.load(folder, device="cpu")
    del tensors[name]
    save_file(tensors, place)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.2\.self_attn\.v_proj\.weight.*missing"):
        TorchDecoder.load(folder, device="cpu")


def test_weights_that_are_not_floats_are_refused(folder: Path) -> None:
    place = folder / "model.safetensors"
    tensors = load_file(place)
    save_file(tensors | {"model.norm.weight": torch.zeros(64, dtype=torch.int32)}, place)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight.*I32"):
        TorchDecoder.load(folder, device="cpu")


def test_truncated_and_missing_files_are_said(folder: Path) -> None:
    place = folder / "model.safetensors"
    place.write_bytes(place.read_bytes()[:5000])
    with pytest.raises(UnreadableModel, match=r"model\.safetensors"):
        open_checkpoint(folder)
    place.unlink()
    with pytest.raises(UnreadableModel, match=r"no \*\.safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnreadableModel, match=r"config\.json"):
        open_checkpoint(folder)


def test_gemma_norms_are_the_multiplier_itself(tmp_path: Path) -> None:
    model = tiny_models.build("gemma3")
    checkpoint = open_checkpoint(tiny_models.save(model, tmp_path))
    stored = dict(model.named_parameters())["model.norm.weight"]
    assert torch.equal(checkpoint.tensor("model.norm.weight", (64,)), stored.detach() + 1.0)
