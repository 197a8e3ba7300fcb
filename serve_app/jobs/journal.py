"""What a batch has done so far, on disk: a job that is killed and started again does no line twice.

out.jsonl.partial   one record for each line that is done, in the order in which they were done
out.jsonl           appears, whole and in the order of the input, when all are
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from serve_app.jobs.lines import Line
from serve_app.openai.sse import on_one_line


@dataclass
class Counts:
    """Lines of an output."""

    answered: int = 0
    failed: int = 0

    def note(self, good: bool) -> None:
        self.answered += good
        self.failed += not good


class JournalError(RuntimeError):
    """The output can't be written as asked; the message says why and what to do."""


class Journal:
    """Open it with `with`. A record counts when the disk has it, or all but the last few seconds of them."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = output.with_name(output.name + ".partial")
        self._new = output.with_name(output.name + ".new")
        self._positions: dict[tuple[int, str], int] = {}  # by line: where its record begins

    def check_source(self, source: Path) -> None:
        """Raises JournalError if the input is one of the files that are written here."""
        if source.resolve() in {path.resolve() for path in (self._output, self._path, self._new)}:
            raise JournalError(f"{source} would be overwritten: choose another --output")

    def __enter__(self) -> Journal:
        """Raises JournalError if another job writes here, or something else is here; OSError if nobody can write."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise JournalError(f"another job writes {self._path}: wait for it, or choose another --output") from None
        try:
            self._load()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            if error is None:  # else a full disk is what the caller hears of already
                raise
        finally:
            if not self._positions:
                self._path.unlink(missing_ok=True)
            self._file.raw.close()  # closing the buffer would try to write again

    def _load(self) -> None:
        """Records up to the first that is not whole: the job was killed while it wrote it."""
        self._file.seek(0)
        whole = 0
        for text in self._file:
            if not text.endswith(b"\n"):
                break
            try:
                entry = json.loads(text)
                self._positions[entry["line"], entry["sha256"]] = whole
            except (ValueError, KeyError, TypeError):
                if not self._positions:
                    complaint = f"{self._path} is not what a job has left: remove it, or choose another --output"
                    raise JournalError(complaint) from None
                break
            whole += len(text)
        self._file.truncate(whole)
        self._file.seek(whole)

    def has(self, line: Line) -> bool:
        """Whether this line, with this text, is done."""
        return (line.number, line.digest) in self._positions

    def add(self, line: Line, record: dict[str, Any]) -> None:
        begin = self._file.tell()
        entry = {"line": line.number, "sha256": line.digest, "record": record}
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._positions[line.number, line.digest] = begin

    def write_output(self, lines: Iterable[Line]) -> Counts:
        """Writes the output, all of it or nothing, and ends the journal. Raises JournalError if a line is not done."""
        counts = Counts()
        with self._new.open("wb") as file:
            for line in lines:
                if not self.has(line):
                    raise JournalError(f"line {line.number} is new: the input has changed meanwhile")
                self._file.seek(self._positions[line.number, line.digest])
                record = json.loads(self._file.readline())["record"]
                text = on_one_line(json.dumps(record, ensure_ascii=False))
                file.write(text.encode("utf-8", "backslashreplace") + b"\n")
                counts.note(good=record["error"] is None)
            file.flush()
            os.fsync(file.fileno())
        self._new.replace(self._output)
        self._path.unlink()
        return counts


def finished_before(output: Path, ids: Iterable[str]) -> bool:
    """Whether the output is there and is that of just these lines, by the ids of its records. Raises JournalError if
    there is another one."""
    if not output.exists():
        return False
    try:
        output_ids = [json.loads(text)["id"] for text in output.read_bytes().splitlines()]
    except (ValueError, KeyError, TypeError):
        output_ids = []
    if output_ids == list(ids):
        return True
    raise JournalError(f"{output} exists and is not the output of this input: remove it, or choose another --output")
