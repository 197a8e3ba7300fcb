"""Building, caching and loading the library, and what is said when there is none."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native, processor
from kernels.compiler import BuildError
from kernels.native import build, library

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler")
not_turned_off = pytest.mark.skipif(os.environ.get("MOORAGE_NATIVE") == "0", reason="turned off by MOORAGE_NATIVE=0")
# Stands in for the sources where only the building is looked at: it compiles in an instant.
SMALL_SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = tmp_path / "cpu"
    sources.mkdir()
    (sources / "small.cpp").write_text(SMALL_SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("MOORAGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    return sources


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


@needs_compiler
@not_turned_off
def test_the_library_is_there_wherever_a_compiler_is() -> None:
    assert native.status() == (True, str(build.built_path()))


@needs_compiler
@not_turned_off
def test_one_openmp_runtime_serves_torch_and_the_library() -> None:
    assert native.shared_object() is not None
    assert len(library._openmp_runtimes()) <= 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64")
def test_is_built_anew_for_another_instruction_set(small_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = set()
    for march in ("x86-64", "x86-64-v2", "x86-64-v3"):
        monkeypatch.setattr(processor, "march", lambda march=march: march)
        assert build.flags()[-1] == f"-march={march}"
        built.add(build.built_path())
    assert len(built) == 3


@needs_compiler
def test_is_built_once_and_again_when_a_source_changes(small_sources: Path) -> None:
    first = build.built_path()
    written = first.stat().st_mtime_ns
    assert build.built_path() == first and first.stat().st_mtime_ns == written
    (small_sources / "small.cpp").write_text(SMALL_SOURCE.replace("42", "43"))
    assert build.built_path() != first


@needs_compiler
def test_two_processes_that_start_together_both_find_it(small_sources: Path) -> None:
    code = (
        "import ctypes, pathlib; from kernels.native import build;"
        f"build.SOURCES = pathlib.Path({str(small_sources)!r});"
        "print(ctypes.CDLL(str(build.built_path())).answer())"
    )
    starters = [python(code) for _ in range(2)]
    assert [starter.communicate(timeout=60)[0].strip() for starter in starters] == ["42", "42"]
    (folder,) = build.cache_folder().iterdir()
    assert {file.name for file in folder.iterdir()} == {"libmoorage_kernels.so", "lock"}


@needs_compiler
def test_a_source_that_does_not_compile_is_reported_and_leaves_nothing(small_sources: Path) -> None:
    (small_sources / "broken.cpp").write_text("int f( {")
    with pytest.raises(BuildError, match=r"broken\.cpp.* failed"):
        build.built_path()
    (folder,) = build.cache_folder().iterdir()
    assert [file.name for file in folder.iterdir()] == ["lock"]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX='no-such-compiler'"):
        build.built_path()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.built_path()


@needs_compiler
def test_a_folder_that_cannot_be_written_is_named(small_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    with pytest.raises(BuildError, match=str(tmp_path / "home")):
        build.built_path()


def test_the_environment_turns_it_off() -> None:
    code = (
        "import torch; from kernels import native; from kernels.norm import rms_norm;"
        "print(native.status(), rms_norm(torch.ones(2, 3), torch.ones(3), 0.0).sum().item())"
    )
    output, _ = python(code, MOORAGE_NATIVE="0").communicate(timeout=120)
    assert output.strip() == "(False, 'turned off by MOORAGE_NATIVE=0') 6.0"
