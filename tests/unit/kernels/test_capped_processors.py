"""What a lesser processor than this one would run, by MOORAGE_CPU in processes of their own: right there too."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kernels import native, processor
from kernels.instruction_cap import LEVELS, InvalidCap, requested_cap
from tests.support import tiny_models
from tests.support.capped_products import inputs, results
from tests.support.gguf_writing import write_gguf

ROOT = Path(__file__).parents[3]
PROCESSES = {
    "none": {"MOORAGE_CPU": "none", "MOORAGE_NATIVE": "1"},
    "avx2": {"MOORAGE_CPU": "avx2", "MOORAGE_NATIVE": "1"},
    "avx2 without a compiler": {"MOORAGE_CPU": "avx2", "MOORAGE_NATIVE": "1", "CXX": "no-such-compiler"},
}
# Where nothing is built yet, three libraries are: a minute, and several on a busy machine.
pytestmark = pytest.mark.timeout(900)
x86_only = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="MOORAGE_CPU is for x86-64")
Results = dict[str, Any]


def python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, dict[str, Results]]:
    """The results of this process, and those of each of PROCESSES, which run side by side."""
    folder = tmp_path_factory.mktemp("capped")
    given = inputs()
    torch.save(given, folder / "inputs")
    model = write_gguf(folder / "model.gguf", tiny_models.build("llama"), Kind.Q8_0)
    running = {
        name: python("-m", "tests.support.capped_products", f"{folder}/inputs", f"{folder}/{name}", str(model), **own)
        for name, own in PROCESSES.items()
    }
    with torch.inference_mode():
        here = results(given, model)
    for name, process in running.items():
        output, _ = process.communicate()
        assert process.returncode == 0, f"{name}:\n{output}"
    return here, {name: torch.load(folder / name) for name in PROCESSES}


@x86_only
@pytest.mark.parametrize("name", PROCESSES)
def test_a_lesser_processor_gives_right_results(everywhere: tuple[Results, dict[str, Results]], name: str) -> None:
    here, there = everywhere[0], everywhere[1][name]
    everything = there["bits"] | there["close"]
    assert here["close"].keys() <= everything.keys()
    for key, expected in (here["bits"] | here["close"]).items():
        found = everything.get(key)
        if found is None:  # what is only the library's
            assert "without" in name, key
            continue
        # bfloat16 may round activations on one of them and not on the other.
        tolerance = 2e-2 if "bfloat16" in key else 3e-6
        assert (found - expected).square().mean().sqrt() < tolerance * expected.std(), key


@x86_only
@pytest.mark.skipif(
    "avx2" not in processor.instructions(), reason="needs two widths of vectors with fused multiply-adds"
)
def test_a_chain_of_fused_multiply_adds_in_one_lane_has_the_same_bits_for_any_width_of_vectors(
    everywhere: tuple[Results, dict[str, Results]],
) -> None:
    here, there = everywhere[0]["bits"], everywhere[1]["avx2"]["bits"]
    common = here.keys() & there.keys()
    assert len(common) > 40 or not native.status()[0]
    assert not [key for key in common if not torch.equal(here[key], there[key])]


@x86_only
@pytest.mark.parametrize("name", PROCESSES)
def test_a_lesser_processor_keeps_the_bits_of_a_row_in_any_batch(
    everywhere: tuple[Results, dict[str, Results]], name: str
) -> None:
    chosen = everywhere[1][name]["chosen"]
    assert [chosen[f"row-invariant {dtype}"] for dtype in (torch.float32, torch.bfloat16)] == ["True"] * 2
    assert [chosen[f"decoder {dtype}"] for dtype in ("float32", "bfloat16")] == ["invariant True, same bits True"] * 2


@x86_only
@pytest.mark.parametrize("name", PROCESSES)
def test_a_lesser_processor_runs_what_it_can(everywhere: tuple[Results, dict[str, Results]], name: str) -> None:
    chosen = everywhere[1][name]["chosen"]
    compiler = "without" not in name and any(map(shutil.which, ("g++", "c++", "clang++")))
    paths = [chosen[product] for product in ("float32 weights", "bfloat16 weights", "8-bit weights", "attention")]
    if compiler:
        assert paths == ["native-fp32", "native-bf16", "native-q8", "native"]
        assert not chosen["notes"]
    else:
        assert paths == ["onednn-fp32", "onednn-fp32", "expanded, onednn-fp32", "torch"]
        assert "no native kernels, so it is several times slower: CXX='no-such-compiler'" in chosen["notes"]
    level = LEVELS[PROCESSES[name]["MOORAGE_CPU"]]
    assert chosen["march"] == level.march or not all(map(torch.cpu.get_capabilities().get, level.needed))


def test_a_cap_that_is_none_of_the_three_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORAGE_CPU", "avx9")
    with pytest.raises(InvalidCap, match=r"MOORAGE_CPU must be none, avx2 or avx512, .*; not 'avx9'"):
        requested_cap()


def test_a_cap_for_another_kind_of_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORAGE_CPU", "avx2")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(InvalidCap, match="MOORAGE_CPU=avx2 is for x86-64; this machine is aarch64"):
        requested_cap()


@x86_only
@pytest.mark.skipif("avx512_f" not in processor.instructions(), reason="needs AVX-512 to fall from")
def test_a_cap_that_comes_after_torch_has_computed_is_an_error() -> None:
    process = python("-c", "import torch; torch.ones(9).exp(); import kernels.processor", MOORAGE_CPU="avx2")
    output, _ = process.communicate()
    assert "InvalidCap: MOORAGE_CPU=avx2 comes too late: torch has computed already" in output
