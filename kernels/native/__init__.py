"""The compiled library: built once for each machine, loaded once in each process by ctypes, plain C outside."""

from kernels.native.library import PARALLEL_ELEMENTS, function, shared_object, status

__all__ = ["PARALLEL_ELEMENTS", "function", "shared_object", "status"]
