"""Compiles the C++ of all operations into one library, once for each machine, compiler and version of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from kernels import processor
from kernels.compiler import BuildError, find_compiler

SOURCES = Path(__file__).parents[1]
# What all operations share lies beside this file.
_HEADERS = Path(__file__).parent

# -ffp-contract=off: a fused multiply-add only where the source says so, which keeps results a matter of the source.
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++17", "-fopenmp", "-fPIC")

_TIMEOUT_SECONDS = 300


def flags() -> tuple[str, ...]:
    """Of the compiler, for this process: MOORAGE_CPU caps the instructions that it may use."""
    return (*FLAGS, f"-march={processor.march()}")


def cache_folder() -> Path:
    """Where built libraries are kept: $MOORAGE_HOME/kernels, by default ~/.cache/moorage/kernels."""
    home = os.environ.get("MOORAGE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "moorage") / "kernels"


def built_path() -> Path:
    """Path of the built library; builds it when the cache has none.

    Safe in several processes at once: one builds under a file lock, the others wait and find the result.
    Raises BuildError with the reason when it can't be built.
    """
    compiler = find_compiler()
    folder = cache_folder() / _fingerprint(compiler)
    library = folder / "libmoorage_kernels.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(
            f"no library can be kept in {folder}: {error}; set MOORAGE_HOME to a folder that can be written"
        ) from error
    return library


def _fingerprint(compiler: str) -> str:
    """Names everything that the library's bits depend on: sources, flags, compiler, processor."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"), *_HEADERS.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join(flags()).encode())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """The processor's name and its instruction sets."""
    lines = [platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = ("model name", "flags", "CPU implementer", "CPU part", "Features")
        first_cpu = info.read_text().split("\n\n", 1)[0]
        lines += [line for line in first_cpu.splitlines() if line.startswith(fields)]
    return "\n".join(lines)


def _compile(compiler: str, library: Path) -> None:
    """Compiles into a folder beside `library` and renames the result to it, so that it is there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        # Sources side by side: the slowest one decides how long the first start waits.
        jobs = []
        for source in sorted(SOURCES.rglob("*.cpp")):
            target = Path(scratch) / f"{source.stem}.o"
            command = [compiler, *flags(), f"-I{_HEADERS}", "-c", str(source), "-o", str(target)]
            jobs.append((command, target, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        try:
            for command, _, process in jobs:
                _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
                if process.returncode:
                    raise BuildError(_failure(command, errors))
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} took longer than {_TIMEOUT_SECONDS} s") from error
        finally:
            for _, _, process in jobs:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        built = Path(scratch) / library.name
        _run([compiler, *flags(), "-shared", *(str(target) for _, target, _ in jobs), "-o", str(built)])
        os.replace(built, library)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if result.returncode:
        raise BuildError(_failure(command, result.stderr))
    return result.stdout


def _failure(command: list[str], errors: str) -> str:
    return f"{' '.join(command)} failed:\n{errors.strip()[-2000:]}"
