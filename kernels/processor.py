"""What the processor of this process can do, within MOORAGE_CPU. Whatever chooses between implementations asks here,
never what a library happens to contain.

Importing it hands the cap on to torch, oneDNN and MKL, so it has to come before the first operation of torch.
"""

from __future__ import annotations

import os

import torch

from kernels import onednn
from kernels.instruction_cap import LEVELS, VARIABLE, InvalidCap, Level, requested_cap

_BF16_ARITHMETIC = ("avx512_bf16", "amx_bf16")


def _apply_cap() -> Level | None:
    """The level that this process is held to: None where the processor has no more than that anyway."""
    name = requested_cap()
    if name is None:
        return None
    level = LEVELS[name]
    os.environ.update(level.settings)
    capabilities = torch.cpu.get_capabilities()
    if not all(capabilities.get(capability) for capability in level.needed):
        return None
    obeyed = torch.backends.cpu.get_cpu_capability().lower() == level.settings["ATEN_CPU_CAPABILITY"]
    if not obeyed or (name != "avx512" and onednn.takes_bfloat16()):
        raise InvalidCap(f"{VARIABLE}={name} comes too late: torch has computed already in this process")
    return level


_cap = _apply_cap()


def instructions() -> tuple[str, ...]:
    """Those that make products faster, as far as this process may use them, in the order of their age."""
    capabilities = torch.cpu.get_capabilities()
    if _cap is not None:
        capabilities = dict.fromkeys(_cap.needed, True)
    return tuple(name for name in ("avx2", "avx512_f", *_BF16_ARITHMETIC) if capabilities.get(name))


def has_bf16_arithmetic() -> bool:
    """It multiplies bfloat16, so products in bfloat16 are faster than in float32 and not only smaller."""
    return not set(_BF16_ARITHMETIC).isdisjoint(instructions())


def march() -> str:
    """The compiler's -march for this process."""
    return "native" if _cap is None else _cap.march
