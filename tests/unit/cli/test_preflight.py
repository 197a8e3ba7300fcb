"""What would stop a start is found before anything starts, without torch and Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_actor.weights.header import Header, read_header
from serve_app.commands import doctor, preflight
from serve_app.commands.accelerator import Gpu, TorchBuild
from serve_app.commands.console import console
from serve_app.commands.doctor import Options
from serve_app.commands.findings import Finding, Mark
from serve_app.config import AppArgs

ROOT = Path(__file__).parents[3]
CPU_BUILD, CUDA_BUILD = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0", "13.0")
L4 = Gpu("NVIDIA L4", 20 * 2**30)


def arguments(**fields: object) -> AppArgs:
    return AppArgs.model_validate({"model": "smollm2", **fields})


@pytest.fixture(scope="module")
def header(smollm2_path: Path) -> Header:
    return read_header(smollm2_path)


def test_the_demo_model_passes_on_this_machine(smollm2_path: Path) -> None:
    found = {finding.what: finding for finding in preflight.preflight(arguments(device="cpu"), smollm2_path)}
    assert {"device", "chat", "memory for the model"} <= set(found)
    assert not [finding for finding in found.values() if finding.mark is Mark.BAD]
    assert found["memory for the model"].detail.startswith("weights ")


def test_neither_torch_nor_ray_is_loaded(smollm2_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom serve_app.config import AppArgs\n"
        "from serve_app.commands.preflight import preflight\n"
        "list(preflight(AppArgs(model='smollm2'), Path(sys.argv[1])))\n"
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(smollm2_path)], cwd=ROOT, check=True)


# -- device ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "gpus", "build", "mark", "said"),
    [
        ("cuda", (), CUDA_BUILD, Mark.BAD, "cuda: this machine shows no NVIDIA GPU; try --device cpu"),
        ("cuda", (L4,), CPU_BUILD, Mark.BAD, "the CPU build, cannot use NVIDIA L4; `make install TORCH=cuda`"),
        ("cuda", (L4,), CUDA_BUILD, Mark.GOOD, "NVIDIA L4"),
        ("auto", (L4,), CPU_BUILD, Mark.NOTE, "cpu: torch 2.13.0+cpu, the CPU build, cannot use NVIDIA L4"),
        ("auto", (), CPU_BUILD, Mark.GOOD, "cpu"),
        ("cpu", (L4,), CPU_BUILD, Mark.GOOD, "cpu"),
    ],
)
def test_a_device_that_cannot_be_used_is_found(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: tuple[Gpu, ...], build: TorchBuild, mark: Mark, said: str
) -> None:
    monkeypatch.delenv(preflight.VISIBLE_VARIABLE, raising=False)
    [finding] = preflight.device(arguments(device=wanted), gpus, build)
    assert finding.mark is mark and said in finding.detail


def test_gpus_that_are_hidden_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "nvidia_gpus", lambda: (L4,))
    monkeypatch.delenv(preflight.VISIBLE_VARIABLE, raising=False)
    assert preflight.visible_gpus() == (L4,)
    for hidden in ("", "-1"):
        monkeypatch.setenv(preflight.VISIBLE_VARIABLE, hidden)
        assert preflight.visible_gpus() == ()
    [finding] = preflight.device(arguments(device="cuda"), (), CUDA_BUILD)
    assert "CUDA_VISIBLE_DEVICES is '-1'" in finding.detail


# -- compiler, shared memory -------------------------------------------------------------------------------------------


def test_a_missing_compiler_is_a_note_and_stops_only_what_cannot_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for weights, mark in (("auto", Mark.NOTE), ("stored", Mark.BAD)):
        [finding] = preflight.compiler(arguments(weights=weights))
        assert finding.mark is mark and "CXX='no-such-compiler' is no program" in finding.detail
    assert not list(preflight.compiler(arguments(device="cuda")))


def test_little_shared_memory_is_a_note_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    [finding] = preflight.shared_memory()
    assert finding.mark is Mark.NOTE
    assert (
        finding.detail.startswith("64 MiB in /, less than Ray's object store wants") and "--shm-size" in finding.detail
    )


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    bad = [finding for finding in preflight.preflight(arguments(device="cpu"), path) if finding.mark is Mark.BAD]
    assert [finding.what for finding in bad] == ["model"]
    assert bad[0].detail == f"{path}: GGUF version 0; versions 2 and 3 can be read"


def test_a_tokenizer_or_sampling_that_cannot_be_read_is_found(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    [finding] = preflight.text(tmp_path)
    assert finding.mark is Mark.BAD and f"no tokenizer can be read from {tmp_path}" in finding.detail
    model = tmp_path / "model.gguf"
    model.symlink_to(smollm2_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    [finding] = preflight.text(model)
    assert finding.mark is Mark.BAD and "generation_config.json: top_p" in finding.detail


def test_a_model_that_cannot_chat_is_a_note(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PromptBuilder", lambda _: SimpleNamespace(why_no_chat="It has no template."))
    assert list(preflight.text(smollm2_path)) == [Finding(Mark.NOTE, preflight.CHAT, "It has no template.")]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "free_gib", "mark", "said"),
    [
        ({}, 4, Mark.GOOD, "of 1 replica; 3.0 GiB are free here"),
        ({"kv_memory": "2GiB"}, 4, Mark.GOOD, "and KV pools 2.0 GiB of 1 replica"),
        (
            {"kv_memory": "2GiB", "replicas": 2},
            4,
            Mark.BAD,
            "KV pools 4.0 GiB of 2 replicas; 3.0 GiB are free here: too",
        ),
        ({"dtype": "float32", "weights": "expanded", "replicas": 6}, 4, Mark.BAD, "too little; try fewer --replicas"),
        ({"kv_memory": "0.0001"}, 4, Mark.BAD, "kv_memory must be at least"),
        ({"replicas": 0, "max_replicas": 4, "min_replicas": 0}, 4, Mark.GOOD, "of 1 replica;"),
    ],
)
def test_memory_is_compared_with_what_weights_and_pools_take(
    monkeypatch: pytest.MonkeyPatch, header: Header, fields: dict[str, object], free_gib: int, mark: Mark, said: str
) -> None:
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: free_gib * 2**30)
    [finding] = preflight.memory(arguments(**fields), header, None, on_gpu=False)
    assert finding.mark is mark and said in finding.detail, finding


def test_a_gpu_has_one_replica_and_memory_of_its_own(header: Header) -> None:
    args = arguments(device="cuda", replicas=4, kv_memory="1GiB")
    [finding] = preflight.memory(args, header, 20 * 2**30, on_gpu=True)
    assert finding.mark is Mark.GOOD and "of 1 replica; 20.0 GiB are free on the GPU" in finding.detail
    [finding] = preflight.memory(args, header, 2**30, on_gpu=True)
    assert finding.mark is Mark.BAD
    assert not list(preflight.memory(args, header, None, on_gpu=True))  # nobody tells


# -- the doctor asks the same ------------------------------------------------------------------------------------------


def doctored(monkeypatch: pytest.MonkeyPatch, **flags: object) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "checks", lambda options: [lambda: doctor._start(options)])
    with console.capture() as captured:
        code = doctor.run(Options("127.0.0.1", 8000, None, flags))
    return code, " ".join(captured.get().split())


def test_the_doctor_looks_at_what_a_start_looks_at(monkeypatch: pytest.MonkeyPatch, smollm2_path: Path) -> None:
    assert doctored(monkeypatch, model=str(smollm2_path), device="cpu")[0] == 0
    monkeypatch.setenv(preflight.VISIBLE_VARIABLE, "")
    code, said = doctored(monkeypatch, model=str(smollm2_path), device="cuda")
    assert code == 1 and "Serving would fail here: device." in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"api_key_file": "/no/such/file"}, "settings api_key_file '/no/such/file' cannot be read"),
        ({"replicas": -1}, "settings replicas:"),
        ({"model": "no-such-model"}, "model model 'no-such-model' is neither a known name"),
    ],
)
def test_the_doctor_names_settings_that_stop_a_start(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], said: str
) -> None:
    code, printed = doctored(monkeypatch, **flags)
    assert code == 1 and said in printed


def test_the_doctor_fetches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOORAGE_HOME", str(tmp_path))
    code, printed = doctored(monkeypatch)
    assert code == 0 and "smollm2 is not here yet; the first start fetches 93 MB" in printed
    assert not list(tmp_path.iterdir())
