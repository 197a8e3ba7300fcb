"""GPUs of this machine and torch's build, found out in milliseconds, without torch and Ray. Also of use before anything
is installed: the standard library is all that is needed."""

from __future__ import annotations

import csv
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")
_QUERY = ["--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """`free_bytes`: None where nobody tells."""

    name: str
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda`: the version of CUDA that it was built for; None: it is a CPU build."""

    version: str
    cuda: str | None

    def __str__(self) -> str:
        return f"torch {self.version}, the {'CPU build' if self.cuda is None else f'build for CUDA {self.cuda}'}"


def nvidia_gpus() -> tuple[Gpu, ...]:
    """By `nvidia-smi`; where there is only a driver, as in some containers, one GPU of unknown name."""
    program = shutil.which("nvidia-smi")
    try:
        lines = [] if program is None else _output([program, *_QUERY]).splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    gpus = tuple(Gpu(row[0].strip(), _mebibytes(row[1])) for row in csv.reader(lines) if len(row) == 2)
    return gpus or ((Gpu("an NVIDIA GPU"),) if _DRIVER.exists() else ())


def torch_build() -> TorchBuild | None:
    """Of the torch that is installed; None: none is, or it does not say. Read from its files: to import it takes
    seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return None
    stated = {
        name: match[1] if (match := re.search(rf"^{name}\b[^=\n]*= *['\"](.+)['\"]", text, re.MULTILINE)) else None
        for name in ("__version__", "cuda")
    }
    return None if stated["__version__"] is None else TorchBuild(stated["__version__"], stated["cuda"])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout


def _mebibytes(text: str) -> int | None:
    """In bytes. Some GPUs share the machine's memory and say `[N/A]`."""
    return int(text) * 2**20 if text.strip().isdigit() else None
