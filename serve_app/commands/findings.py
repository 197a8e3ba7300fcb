"""What a check of the machine found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    GOOD = "[green]ok[/]"
    NOTE = "[yellow]note[/]"
    BAD = "[bold red]no[/]"


@dataclass(frozen=True, slots=True)
class Finding:
    """`NOTE` is slower or less than it could be; `BAD` means that `moorage serve` would fail."""

    mark: Mark
    what: str
    detail: str
