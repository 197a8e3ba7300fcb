"""The installer: which torch, by what a machine has, and what is said meanwhile."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from serve_app.commands import accelerator, install
from serve_app.commands.accelerator import Gpu, TorchBuild, nvidia_gpus, torch_build
from serve_app.commands.install import CPU_INDEX, InstallFailed, choose, index_refused, source_settings
from serve_app.commands.pip_progress import PipProgress
from tests.support.pins import direct_requirements, pins

ROOT = Path(__file__).parents[3]
CPU_BUILD, CUDA_BUILD = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0", "13.0")
L4 = Gpu("NVIDIA L4", 20 * 2**30)


def nothing_refused(index: str) -> str:
    return ""


def chosen(
    wanted: str = "auto",
    *,
    system: str = "Linux",
    installed: TorchBuild | None = None,
    gpus: Sequence[Gpu] = (),
    settings: Sequence[str] = (),
    refused: Callable[[str], str] = nothing_refused,
) -> tuple[str, str | None, bool]:
    choice = choose(
        wanted, system=system, installed=installed, gpus=gpus, settings=settings, index=CPU_INDEX, refused=refused
    )
    return choice.words, choice.index, choice.replaces


# -- which build -------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_takes_the_cpu_build_and_says_so() -> None:
    words, index, replaces = chosen()
    assert words.startswith("torch: the CPU build (no NVIDIA GPU is found") and index == CPU_INDEX and not replaces


def test_a_machine_with_a_gpu_takes_the_build_for_cuda_and_says_which_gpu() -> None:
    assert chosen(gpus=[L4]) == ("torch: the build for CUDA (this machine has NVIDIA L4), several GB", None, False)
    assert chosen("cpu", gpus=[L4])[1] == CPU_INDEX
    assert chosen("cuda")[1] is None and "asked for" in chosen("cuda")[0]


def test_settings_of_pip_win_and_no_address_is_asked() -> None:
    def refused(index: str) -> str:
        pytest.fail("asked")

    for wanted in ("auto", "cpu", "cuda"):
        words, index, _ = chosen(wanted, settings=["find-links", "index-url"], refused=refused)
        assert index is None and "pip's own settings lead to (find-links, index-url)" in words


def test_an_index_that_cannot_be_reached_leaves_plain_pip_and_says_why() -> None:
    words, index, _ = chosen(refused=lambda index: "connection refused")
    assert index is None
    assert f"{CPU_INDEX} cannot be used (connection refused)" in words and "several GB" in words


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_elsewhere_than_on_linux_pypi_has_the_right_build(system: str) -> None:
    assert chosen(system=system) == (f"torch: PyPI's build for {system}", None, False)


def test_a_torch_that_is_installed_stays_unless_the_other_one_is_asked_for() -> None:
    assert chosen(installed=CPU_BUILD, gpus=[L4]) == ("torch 2.13.0+cpu, the CPU build, is installed", None, False)
    assert chosen("cuda", installed=CUDA_BUILD)[0] == "torch 2.13.0, the build for CUDA 13.0, is installed"
    assert chosen("cuda", installed=CPU_BUILD)[1:] == (None, True)
    assert chosen("cpu", installed=CUDA_BUILD)[1:] == (CPU_INDEX, True)


# -- what is found out -------------------------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "echo 'NVIDIA L4, 21950'; echo 'NVIDIA L4, 100'",
            (Gpu("NVIDIA L4", 21950 << 20), Gpu("NVIDIA L4", 100 << 20)),
        ),
        ("echo 'NVIDIA GB10, [N/A]'", (Gpu("NVIDIA GB10", None),)),
        ("echo 'No devices were found'", ()),
        ("echo 'NVIDIA-SMI has failed because it cannot talk to the driver'; exit 9", ()),
    ],
)
def test_gpus_are_found_by_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, found: tuple[Gpu, ...]
) -> None:
    program(tmp_path / "bin", "nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(accelerator, "_DRIVER", tmp_path / "none")
    assert nvidia_gpus() == found


def test_without_nvidia_smi_a_driver_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(accelerator, "_DRIVER", tmp_path / "version")
    assert nvidia_gpus() == ()
    (tmp_path / "version").touch()
    assert nvidia_gpus() == (Gpu("an NVIDIA GPU"),)


def test_the_build_of_torch_is_read_and_not_imported() -> None:
    found = torch_build()
    assert found == TorchBuild(torch.__version__, torch.version.cuda)
    code = (
        "import sys; from serve_app.commands.accelerator import torch_build as b; b(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_installer_needs_the_standard_library_only() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import serve_app.commands.install"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def fake_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    """Notes its arguments in the file that is returned, then runs `text`."""
    program(folder / "bin", "pip", f'echo "$@" >> {folder / "calls"}\n{text}')
    monkeypatch.setattr(install, "_PIP", [str(folder / "bin" / "pip")])
    return folder / "calls"


def test_settings_that_name_sources_are_known_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [
        "global.cert='/c'",
        ":env:.find-links='/wheels'",
        "install.extra-index-url='https://i'",
        "global.timeout='9'",
    ]
    fake_pip(monkeypatch, tmp_path, "\n".join(f'echo "{line}"' for line in lines))
    assert source_settings() == ("extra-index-url", "find-links")


def test_an_index_is_refused_with_pips_last_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_pip(monkeypatch, tmp_path, "echo first >&2; echo 'ERROR: No matching distribution' >&2; exit 1")
    assert index_refused("https://i") == "ERROR: No matching distribution"
    assert "--index-url https://i" in calls.read_text()
    broken = "NewConnectionError('<pip at 0x7f>: Failed: [Errno 111] Connection refused')': /whl/cpu/torch/"
    fake_pip(monkeypatch, tmp_path, f'echo "WARNING: {broken}" >&2; echo "ERROR: none" >&2; exit 1')
    assert index_refused("https://i") == "Connection refused"
    fake_pip(monkeypatch, tmp_path, "exit 0")
    assert index_refused("https://i") == ""


# -- the installation --------------------------------------------------------------------------------------------------


def progress() -> tuple[PipProgress, io.StringIO]:
    stream = io.StringIO()
    return PipProgress(stream, lambda: 10**9), stream


def test_torch_alone_comes_from_its_index_and_everything_is_pinned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = fake_pip(monkeypatch, tmp_path, "")
    install.install("test", install.TorchSource("", CPU_INDEX, replaces=True), progress()[0])
    pinned = "install --constraint cluster_configs/constraints.txt"
    assert calls.read_text().splitlines() == [
        "uninstall --yes torch",
        f"{pinned} --extra-index-url {CPU_INDEX} torch==2.13.*",
        f"{pinned} --editable .[test]",
    ]


def test_what_pip_says_is_shown_as_a_few_lines_and_whole_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = """
echo 'Collecting torch==2.13.*'
echo 'Downloading torch-2.13.0-cp311-linux.whl (196.1 MB)'
echo 'Downloading six-1.16.whl (11 kB)'
echo 'Downloading numpy-2.4.whl (9.6 MB)'
echo 'Installing collected packages: six, torch'
echo 'WARNING: Location is ignored' >&2
echo 'WARNING: Retrying (Retry(total=4)) after connection broken' >&2
"""
    fake_pip(monkeypatch, tmp_path, said)
    told, stream = progress()
    install.install(None, install.TorchSource(""), told)
    lines = [line.partition("] ")[2] or line for line in stream.getvalue().splitlines()]
    assert lines == [
        "downloading torch-2.13.0-cp311-linux.whl (196.1 MB)",
        "installing 2 packages",
        "WARNING: Retrying (Retry(total=4)) after connection broken",
    ]
    fake_pip(monkeypatch, tmp_path, f"{said}\necho 'no space left'; exit 3")
    told, stream = progress()
    with pytest.raises(InstallFailed, match=r"failed with exit code 3"):
        install.install(None, install.TorchSource(""), told)
    for line in ("Downloading six-1.16.whl", "WARNING: Location is ignored", "no space left"):
        assert line in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "shown"),
    [
        (io.StringIO(), 9.0, ""),
        (io.StringIO(), 11.0, "[  11 s] looking up ray (1 packages looked up, 1.0 GB written)\n"),
        (Terminal(), 1.0, "\r\x1b[K[   1 s] looking up ray (1 packages looked up, 1.0 GB written)"),
    ],
)
def test_while_pip_is_quiet_it_is_said_where_it_is(stream: io.StringIO, seconds: float, shown: str) -> None:
    now = iter([0.0])
    told = PipProgress(stream, lambda: 10**9, lambda: next(now, seconds))
    process = subprocess.Popen(
        [sys.executable, "-c", "print('Collecting ray')"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert told.follow(process) == 0
    assert stream.getvalue() == shown


# -- the pins ----------------------------------------------------------------------------------------------------------


def pinned() -> dict[str, Version]:
    lines = (ROOT / install.CONSTRAINTS).read_text("utf-8").splitlines()
    named = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: Version(version) for name, version in named}


def test_every_requirement_has_a_pin_that_it_allows_and_each_build_of_torch_meets_it() -> None:
    found = pinned()
    for requirement in direct_requirements():
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement
    assert all(version.local is None for version in found.values())
    for build in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130"):
        assert Version(build) in SpecifierSet(f"=={found['torch']}")


def test_pins_are_what_is_installed_with_all_that_it_needs() -> None:
    found = pins()
    assert Version(found["torch"]) == Version(Version(torch.__version__).public)
    assert {"starlette", "sympy", "ray"} <= set(found)
    assert "colorful" in found  # of ray's extra for Serve
    assert "moorage" not in found
