"""tests/parity/BEHAVIOURS.md, read by a program: sections A to W of behaviours F001 to F366, then rules C01 to C37."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parents[1] / "parity" / "BEHAVIOURS.md"
_HEADING = re.compile(r"## (?:(?P<letter>[A-Z])\. )?(?P<title>\S.*)")
_ENTRY = re.compile(r"- \*\*(?P<number>F\d{3}|C\d{2})\*\* (?P<sentence>\S.*)")


@dataclass(frozen=True)
class Section:
    letter: str
    title: str
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Behaviours:
    """`sentences` has every number's sentence, those of the rules too; rules belong to no section."""

    sections: tuple[Section, ...]
    rules: tuple[str, ...]
    sentences: Mapping[str, str]

    def in_sections(self, letters: str) -> list[Section]:
        """Raises ValueError for a letter that no section has."""
        unknown = sorted(set(letters) - {section.letter for section in self.sections})
        if unknown:
            raise ValueError(f"no section {', '.join(unknown)}")
        return [section for section in self.sections if section.letter in letters]


def read_behaviours(text: str) -> Behaviours:
    """Raises ValueError for a line of a list that is no entry, an entry without a heading, and a number that is there
    twice."""
    numbers: dict[tuple[str, str], list[str]] = {}
    sentences: dict[str, str] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if heading := _HEADING.fullmatch(line):
            current = numbers.setdefault((heading["letter"] or "", heading["title"]), [])
        elif line.startswith("- "):
            entry = _ENTRY.fullmatch(line)
            if entry is None or current is None or entry["number"] in sentences:
                raise ValueError(f"{line!r} is not a new number with its sentence, below a heading")
            sentences[entry["number"]] = entry["sentence"]
            current.append(entry["number"])
    sections = (Section(letter, title, tuple(listed)) for (letter, title), listed in numbers.items() if letter)
    rules = (number for (letter, _), listed in numbers.items() if not letter for number in listed)
    return Behaviours(tuple(sections), tuple(rules), sentences)


def house_behaviours() -> Behaviours:
    return read_behaviours(PATH.read_text(encoding="utf-8"))
