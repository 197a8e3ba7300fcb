"""Which implementation of an operation runs on which device, in one place for all operations that are functions.

Layers with weights of their own choose when they are made: see `linear/packed.py` and `quantized_linear/cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from typing import TypeVar

from kernels import native

Operation = TypeVar("Operation")


class ByDevice(dict[bool, Operation]):
    """An operation's implementations, for CUDA and for the CPU: `table[x.is_cuda](x, ...)`. To ask a tensor for its
    device's type takes 0.5 us, more than all the rest of a call's way to its implementation.

    reference  runs anywhere
    bind       makes the CPU's implementation from the native library. It is made once, at the first call that finds the
               library; so a call costs one look-up
    """

    def __init__(self, reference: Operation, bind: Callable[[CDLL], Operation]) -> None:
        super().__init__()
        self._reference, self._bind = reference, bind

    def __missing__(self, is_cuda: bool) -> Operation:
        library = None if is_cuda else native.shared_object()
        if library is None:
            return self._reference
        self[is_cuda] = bound = self._bind(library)
        return bound

    def kind(self, is_cuda: bool) -> str:
        """What runs there: "native" or "torch"."""
        return "torch" if self[is_cuda] is self._reference else "native"
