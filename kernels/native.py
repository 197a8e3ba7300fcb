"""The compiled library of this process: loaded once, by ctypes, with a plain C interface.

MOORAGE_NATIVE=0 in the environment turns it off; every operation then runs its torch reference.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch  # noqa: F401  first, so that the library finds torch's OpenMP runtime loaded and takes it

from kernels.build import BuildError, built_path

_LINEAR = [c_void_p] * 4 + [c_int64] * 3 + [c_int]
_PACK = [c_void_p] * 2 + [c_int64] * 2 + [c_int]
_GATED = [c_void_p] * 2 + [c_int64] * 2 + [c_int]
_KV_WRITE = [c_void_p, c_int64, c_void_p, c_int64] + [c_void_p] * 3 + [c_int64] * 2 + [c_int]
_ATTENTION = [c_void_p, c_int64] + [c_void_p] * 6 + [c_int64] * 6 + [c_float, c_int64, c_int]
_FORM = [c_int64] + [c_int] * 3  # group, bits, bytes of a scale, whether there are minimums
_ARGUMENTS = {
    "moorage_linear_pack_f32": _PACK,
    "moorage_linear_pack_bf16": _PACK,
    "moorage_linear_f32": _LINEAR,
    "moorage_linear_bf16": _LINEAR,
    "moorage_quantized_pack": [c_void_p] * 4 + [c_int64] * 2 + _FORM + [c_int],
    "moorage_quantized_linear": [c_void_p] * 4 + [c_int64] * 3 + _FORM + [c_int],
    "moorage_quantized_dots": [c_void_p] * 4 + [c_int64] * 3 + _FORM + [c_int],
    "moorage_quantized_rows": [c_void_p] * 3 + [c_int64] * 2 + _FORM + [c_int],
    "moorage_rms_norm": [c_void_p, c_int64, c_void_p, c_float, c_void_p] + [c_int64] * 3 + [c_int],
    "moorage_rotary": [c_void_p, c_int64, c_void_p, c_void_p] + [c_int64] * 3 + [c_int],
    "moorage_gated_silu": _GATED,
    "moorage_gated_gelu_tanh": _GATED,
    "moorage_kv_write_f32": _KV_WRITE,
    "moorage_kv_write_bf16": _KV_WRITE,
    "moorage_paged_attention_f32": _ATTENTION,
    "moorage_paged_attention_bf16": _ATTENTION,
}
_SIZES = {
    "moorage_linear_packed_size": [c_int64] * 2,
    "moorage_quantized_packed_size": [c_int64] * 2 + _FORM,
}

# Below so many elements a thread's wake-up costs more than its share of an elementwise operation.
PARALLEL_ELEMENTS = 32768


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("MOORAGE_NATIVE", "1") == "0":
        return None, "turned off by MOORAGE_NATIVE=0"
    try:
        path = built_path()
        loaded = ctypes.CDLL(str(path))
    except (BuildError, OSError) as error:
        return None, str(error)
    runtimes = _openmp_runtimes()
    if len(runtimes) > 1:
        # Two runtimes would each keep their own threads and fight for the cores.
        return None, f"more than one OpenMP runtime is loaded: {', '.join(sorted(runtimes))}"
    declare(loaded)
    return loaded, f"{path}"


def declare(library: ctypes.CDLL, only: str = "") -> None:
    """Tells ctypes the arguments of the functions whose names start with `only`."""
    for results, functions in ((c_int64, _SIZES), (None, _ARGUMENTS)):
        for name, arguments in functions.items():
            if name.startswith(only):
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, results


def shared_object() -> ctypes.CDLL | None:
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
