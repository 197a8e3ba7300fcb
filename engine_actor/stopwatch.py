"""Named steps and their seconds, for the log of a start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`seconds`: of each step that has ended, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measures the block, also one that fails."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - begun
