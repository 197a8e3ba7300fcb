"""Loading the compiled library.

MOORAGE_NATIVE=0 in the environment turns it off; every operation then runs its torch reference.
"""

from __future__ import annotations

import os
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401  first, so that the library finds torch's OpenMP runtime loaded and takes it

from kernels.compiler import BuildError
from kernels.native.build import built_path

# Below so many elements a thread's wake-up costs more than its share of an elementwise operation.
PARALLEL_ELEMENTS = 32768


@cache
def _load() -> tuple[CDLL | None, str]:
    if os.environ.get("MOORAGE_NATIVE", "1") == "0":
        return None, "turned off by MOORAGE_NATIVE=0"
    try:
        path = built_path()
        loaded = CDLL(str(path))
    except (BuildError, OSError) as error:
        return None, str(error)
    runtimes = _openmp_runtimes()
    if len(runtimes) > 1:
        # Two runtimes would each keep their own threads and fight for the cores.
        return None, f"more than one OpenMP runtime is loaded: {', '.join(sorted(runtimes))}"
    return loaded, f"{path}"


def function(library: CDLL, name: str, arguments: list[Any], result: Any = None) -> Any:
    """A function of the library that knows its C types; each operation states its own."""
    symbol = getattr(library, name)
    symbol.argtypes, symbol.restype = arguments, result
    return symbol


def shared_object() -> CDLL | None:
    """The library, or None where there is none; the first call may compile it (seconds)."""
    return _load()[0]


def status() -> tuple[bool, str]:
    """(available, the library's path or the reason why there is none)."""
    loaded, reason = _load()
    return loaded is not None, reason


def _openmp_runtimes() -> set[str]:
    """Paths of the OpenMP runtimes mapped into this process; empty where there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    paths = (line.split()[-1] for line in maps.read_text().splitlines() if "/" in line)
    return {path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}
