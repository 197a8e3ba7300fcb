"""What a runtime raises in a step, as one of the classes that `Decoder.launch` promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine_actor.errors import ExecutionMemoryExceeded

# Allocators without an exception type of their own: torch's for the CPU, ONNX Runtime's.
_WORDS = ("can't allocate memory", "Failed to allocate memory")


@contextmanager
def step_failures(tokens: int) -> Iterator[None]:
    """Around all that a step of so many tokens runs. Raises ExecutionMemoryExceeded where memory ran out; all else
    passes as it is."""
    try:
        yield
    except Exception as error:
        if not is_memory_exhaustion(error):
            raise
        raise ExecutionMemoryExceeded(f"a step of {tokens} tokens: {type(error).__name__}: {error}") from error


def is_memory_exhaustion(error: Exception) -> bool:
    """MemoryError, an out-of-memory error of whatever runtime, or one that says so only in words (F171)."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool({"MemoryError", "OutOfMemoryError"} & names) or any(words in str(error) for words in _WORDS)
