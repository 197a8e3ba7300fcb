"""What files say before a tensor is read: the same as what loading them finds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import UnreadableModel, UnsupportedModel
from engine_actor.weights.header import read_header
from engine_actor.weights.opening import open_checkpoint
from tests.support import tiny_models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_a_folder_takes_the_memory_that_its_header_says(
    tmp_path: Path, family: str, dtype: str, element_bytes: int
) -> None:
    folder = tiny_models.save(tiny_models.build(family), tmp_path)
    header = read_header(folder)
    assert header.config == open_checkpoint(folder).config
    assert header.weight_bytes(element_bytes, as_stored=True) == TorchDecoder.load(folder, dtype=dtype).weight_bytes


@pytest.mark.parametrize(("weights", "as_stored"), [("auto", True), ("expanded", False)])
def test_a_gguf_file_takes_about_the_memory_that_its_header_says(
    smollm2_path: Path, weights: str, as_stored: bool
) -> None:
    found = TorchDecoder.load(smollm2_path, weights=weights).weight_bytes
    assert read_header(smollm2_path).weight_bytes(2, as_stored=as_stored) == pytest.approx(found, rel=0.05)


def test_the_states_of_a_model_are_those_of_its_decoder(llama: Path) -> None:
    assert read_header(llama).config.paged_state(2) == TorchDecoder.load(llama).manifest.paged


def test_headers_are_read_without_torch(smollm2_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine_actor.weights.header import read_header as r\n"
        "r(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(smollm2_path)], check=True)


def copy_of(llama: Path, to: Path) -> Path:
    return Path(shutil.copytree(llama, to / "model"))


def test_truncated_weights_are_unreadable(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnreadableModel, match=r"model\.safetensors"):
        read_header(folder)
    file.unlink()
    with pytest.raises(UnreadableModel, match=r"there is no \*\.safetensors file"):
        read_header(folder)


def test_an_architecture_that_is_not_known_is_unsupported(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(UnsupportedModel, match="model_type 'mamba' is not supported"):
        read_header(folder)
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 20}))
    with pytest.raises(UnsupportedModel, match="head size 20: multiples of 8"):
        read_header(folder)


def test_tensors_that_are_no_floats_are_unsupported(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path)
    tensors = {name: np.asarray(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor 'model\.norm\.weight' holds I8"):
        read_header(folder)


def test_a_block_format_that_cannot_be_expanded_is_unsupported(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_actor.weights import header

    def refuse(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        raise NotImplementedError(f"{kind.name} cannot be expanded")

    monkeypatch.setattr(header, "dequantize", refuse)
    with pytest.raises(UnsupportedModel, match="cannot be expanded"):
        read_header(smollm2_path)
    with pytest.raises(UnreadableModel, match="no such file or folder"):
        read_header(smollm2_path.parent / "none.gguf")
