"""MOORAGE_CPU: a process behaves as on a processor with fewer instructions, so that any machine can try the paths of an
older one. Loads without torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

VARIABLE = "MOORAGE_CPU"


@dataclass(frozen=True, slots=True)
class Level:
    """A set of x86-64 instructions, under the names that each reader gives it.

    march     the compiler's
    settings  environment variables of torch, oneDNN and MKL, which read them at their first operation
    needed    the processor's capabilities, as `torch.cpu.get_capabilities` calls them
    """

    march: str
    settings: dict[str, str]
    needed: frozenset[str]


def _settings(aten: str, onednn: str, mkl: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}


_AVX2 = frozenset({"avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"})
_AVX512 = _AVX2 | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
LEVELS = {
    "none": Level("x86-64", _settings("default", "SSE41", "SSE4_2"), frozenset()),
    "avx2": Level("x86-64-v3", _settings("avx2", "AVX2", "AVX2"), _AVX2),
    "avx512": Level("x86-64-v4", _settings("avx512", "AVX512_CORE", "AVX512"), _AVX512),
}


class InvalidCap(ValueError):
    """MOORAGE_CPU names nothing that this machine can be held to."""


def requested_cap() -> str | None:
    """What MOORAGE_CPU says: a name in LEVELS, or None where it is not set. Raises InvalidCap."""
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    if value not in LEVELS:
        caps = "none, avx2 or avx512"
        raise InvalidCap(f"{VARIABLE} must be {caps}, or unset for all that the processor has; not {value!r}")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise InvalidCap(f"{VARIABLE}={value} is for x86-64; this machine is {platform.machine()}: unset it")
    return value
