"""Which implementation of an operation runs on which device, in one place for all operations that are functions.

Layers with weights of their own choose when they are made: see `linear/packed.py` and `quantized_linear/cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from typing import TypeVar

from kernels import native

Operation = TypeVar("Operation")


class ByDevice(dict[str, Operation]):
    """An operation's implementations by the type of a tensor's device: `table[x.device.type](x, ...)`.

    reference  runs anywhere
    bind       makes the CPU's implementation from the native library. It is made once, at the first call that finds the
               library; so a call costs one look-up
    """

    def __init__(self, reference: Operation, bind: Callable[[CDLL], Operation]) -> None:
        super().__init__()
        self._reference, self._bind = reference, bind

    def __missing__(self, device: str) -> Operation:
        library = native.shared_object() if device == "cpu" else None
        if library is None:
            return self._reference
        self[device] = bound = self._bind(library)
        return bound

    def kind(self, device: str) -> str:
        """ "native" or "torch"."""
        return "torch" if self[device] is self._reference else "native"
