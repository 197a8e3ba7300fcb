"""What `make` and the Dockerfile install Moorage with: pip, with the versions that were tested and the build of torch
that suits the machine, and with a line every few seconds that says how far it is.

    python -m serve_app.commands.install [--torch auto|cpu|cuda] [--extra test]

in the root of the repository, with the Python of the environment that it installs into. The standard library is all
that is there at that time.

On PyPI torch's wheel for Linux is the build for CUDA, which brings several GB along. The CPU build is on an index of
torch's own, which is asked for torch alone. Where pip's own settings name an index or a folder of wheels, they decide.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.commands.accelerator import Gpu, TorchBuild, nvidia_gpus, torch_build
from serve_app.commands.pip_progress import PipProgress

ROOT = Path(__file__).parents[2]
CONSTRAINTS = Path("cluster_configs", "constraints.txt")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Settings of pip that say where packages come from, in whatever file or variable.
_SOURCES = re.compile(r"^[^=]*\.(index-url|extra-index-url|find-links|no-index)=", re.MULTILINE)
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


class InstallFailed(Exception):
    """Something could not be installed; the message is for the user."""


@dataclass(frozen=True, slots=True)
class TorchSource:
    """`index`: where torch is looked for beside PyPI; None: nowhere else. `replaces`: what is installed has to go."""

    words: str
    index: str | None = None
    replaces: bool = False


def choose(
    wanted: str,
    *,
    system: str,
    installed: TorchBuild | None,
    gpus: Sequence[Gpu],
    settings: Sequence[str],
    index: str,
    refused: Callable[[str], str],
) -> TorchSource:
    """Which torch. `settings`: those of pip that name sources. `refused`: why an index cannot be used; empty if it can.
    It is asked only where the answer counts."""
    if installed is not None and (wanted == "auto" or (wanted == "cpu") == (installed.cuda is None)):
        return TorchSource(f"{installed}, is installed")
    replaces = installed is not None
    if settings:
        return TorchSource(
            f"torch: the build that pip's own settings lead to ({', '.join(settings)})", replaces=replaces
        )
    if system != "Linux":
        return TorchSource(f"torch: PyPI's build for {system}", replaces=replaces)
    if wanted == "cuda" or (wanted == "auto" and gpus):
        reason = "asked for" if wanted == "cuda" else f"this machine has {gpus[0].name}"
        return TorchSource(f"torch: the build for CUDA ({reason}), several GB", replaces=replaces)
    reason = "asked for" if wanted == "cpu" else "no NVIDIA GPU is found; TORCH=cuda takes the other one"
    if why := refused(index):
        words = f"torch: PyPI's build, which on Linux is that for CUDA, several GB: {index} cannot be used ({why})"
        return TorchSource(words, replaces=replaces)
    return TorchSource(f"torch: the CPU build ({reason})", index, replaces)


def source_settings() -> tuple[str, ...]:
    """Names of pip's settings that say where packages come from."""
    listing = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=False)
    return tuple(sorted(set(_SOURCES.findall(listing.stdout))))


def index_refused(index: str) -> str:
    """By pip itself, so that its proxies and certificates hold."""
    command = [*_PIP, "index", "versions", "torch", "--index-url", index, "--retries", "1", "--timeout", "10"]
    attempt = subprocess.run(command, capture_output=True, text=True, check=False)
    if attempt.returncode == 0:
        return ""
    if broken := re.search(r"\[Errno -?\d+\] ([^'\")]+)", attempt.stderr):
        return broken[1]
    return (attempt.stderr.strip().splitlines() or ["pip does not say why"])[-1]


def install(extra: str | None, choice: TorchSource, progress: PipProgress) -> None:
    """Raises InstallFailed."""
    with_pins = ["install", "--constraint", str(CONSTRAINTS)]
    if choice.replaces:
        _pip(["uninstall", "--yes", "torch"], progress)
    if choice.index is not None:  # for torch alone: the others come from where they always come from
        _pip([*with_pins, "--extra-index-url", choice.index, _torch_requirement()], progress)
    _pip([*with_pins, "--editable", f".[{extra}]" if extra else "."], progress)


def _torch_requirement() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [requirement_text] = [requirement for requirement in project["dependencies"] if re.match(r"torch\b", requirement)]
    return str(requirement_text)


def _pip(arguments: list[str], progress: PipProgress) -> None:
    command = [*_PIP, *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        code = progress.follow(process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise InstallFailed(f"`{' '.join(command[1:])}` failed with exit code {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.commands.install", description="Installs Moorage.")
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto", help="its build; auto: by the GPUs")
    parser.add_argument("--torch-index", default=CPU_INDEX, help="where its CPU build is")
    parser.add_argument("--extra", help="of pyproject.toml, such as test")
    options = parser.parse_args(arguments)
    environment = Path(sys.prefix)
    before = shutil.disk_usage(environment).used  # what grows there meanwhile is, mostly, what pip writes
    progress = PipProgress(sys.stdout, lambda: max(0, shutil.disk_usage(environment).used - before))
    choice = choose(
        options.torch,
        system=platform.system(),
        installed=torch_build(),
        gpus=nvidia_gpus(),
        settings=source_settings(),
        index=options.torch_index,
        refused=index_refused,
    )
    progress.say(choice.words)
    try:
        install(options.extra, choice, progress)
    except InstallFailed as error:
        progress.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        progress.say("interrupted; the same command goes on from here")
        return 130
    progress.say(f"done: {torch_build()}; {_size(environment) / 1e9:.1f} GB in {environment}")
    return 0


def _size(folder: Path) -> int:
    return sum(
        entry.lstat().st_size for parent, _, names in os.walk(folder) for entry in (Path(parent, n) for n in names)
    )


if __name__ == "__main__":
    sys.exit(main())
