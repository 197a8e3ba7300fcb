"""What the commands print with: steps with their seconds, a download bar, errors in one place."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.status import Status

from serve_app.model_store import resolve_model

# Into a pipe or a file a line goes whole: a path that was cut in two can neither be copied nor searched for.
_WIDTH = None if sys.stdout.isatty() else 1000

console = Console(highlight=False, width=_WIDTH)
errors = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    errors.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def say(message: str) -> None:
    console.print(escape(message), soft_wrap=True)


class Step:
    """One named step: a spinner with its seconds while it runs, one line when it is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()
        self._status = Status("", console=console)
        self.note("")

    def note(self, detail: str) -> None:
        """Shows how far it is. Call it often: it also moves the seconds on."""
        text = f"{self._name} {detail}".rstrip()
        self._status.update(f"{escape(text)} [dim]{self.seconds:.0f} s[/]")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun


@contextmanager
def step(name: str) -> Iterator[Step]:
    """Prints `name` with its seconds, or that it failed."""
    new = Step(name)
    mark = "[red]x[/]"
    try:
        with new._status:
            yield new
        mark = "[green]+[/]"
    finally:
        console.print(f"{mark} {escape(name)} [dim]{new.seconds:.1f} s[/]", soft_wrap=True)


def fetch_with_bar(model: str) -> Path:
    """`resolve_model` with a bar that appears only if there is something to do. Raises ModelStoreError."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def progress(name: str, done: int, total: int) -> None:
        bar.start()
        if name not in tasks:
            tasks[name] = bar.add_task(f"{model}: {name}", total=total or None)
        bar.update(tasks[name], completed=done)

    try:
        path = resolve_model(model, progress=progress)
    finally:
        if tasks:
            bar.stop()
    if tasks:
        say(f"+ {model} is at {path}")
    return path
