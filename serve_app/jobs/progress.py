"""How far a batch is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serve_app.commands.console import console, say

LOG_SECONDS = 10.0


class BatchProgress:
    """`advance` is called once for each line that is done; `before` of `total` were done by an earlier run."""

    def __init__(self, before: int, total: int) -> None:
        self._total = total
        self._before = self._lines_done = before
        self._failed = 0
        self._begun = self._logged = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("lines"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[failed]} failed"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, completed=before, failed=0)

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, good: bool) -> None:
        self._lines_done += 1
        self._failed += not good
        if self._bar is not None:
            self._bar.update(self._task, completed=self._lines_done, failed=self._failed)
        elif time.monotonic() >= self._logged + LOG_SECONDS:
            self._logged = time.monotonic()
            pace = (self._lines_done - self._before) / (self._logged - self._begun)
            say(
                f"{self._lines_done} of {self._total} lines, {self._failed} failed, {pace:.1f} lines/s, "
                f"about {(self._total - self._lines_done) / pace:.0f} s left"
            )
