"""pip's output as a few lines that say how far it is: on a terminal one line that changes, else one every few seconds.

Needs the standard library only.
"""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

# Without a terminal: no more lines than a log wants.
_QUIET_SECONDS = 10.0
_TERMINAL_SECONDS = 0.5
_KEPT_LINES = 60
_BIG = re.compile(r"\((\d\d+(\.\d+)? MB|\d+(\.\d+)? GB)\)")  # from 10 MB on


class PipProgress:
    """`written`: bytes on the disk since the start."""

    def __init__(self, stream: TextIO, written: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._written, self._clock = stream, written, clock
        self._begun = clock()
        self._terminal = stream.isatty()
        self._last = self._begun
        self._packages = 0
        self._phase = "starting pip"

    def say(self, text: str) -> None:
        """A line that stays."""
        self._stream.write(f"{self._clear()}{text}\n")
        self._stream.flush()
        self._last = self._clock()

    def follow(self, process: subprocess.Popen[str]) -> int:
        """Until the process ends; its exit code. Errors and broken connections are shown as they come, and all of
        its last lines if it has failed."""
        assert process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), name="pip", daemon=True)
        reader.start()
        last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        while True:
            try:
                line = lines.get(timeout=_TERMINAL_SECONDS)
            except queue.Empty:
                self._tick()
                continue
            if line is None:
                break
            last_lines.append(line)
            self._note(line)
            self._tick()
        code = process.wait()
        if code:
            self.say("\n".join(last_lines))
        return code

    def _note(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        if word == "Collecting":
            self._packages += 1
            self._phase = f"looking up {rest.split(' (')[0]}"
        elif word in ("Downloading", "Using", "Processing", "Obtaining", "Preparing"):
            name = rest.removeprefix("cached ").rsplit("/", 1)[-1]
            self._phase = f"{word.lower()} {name}" if word != "Using" else f"taking {name} from pip's cache"
            if word == "Downloading" and _BIG.search(name):
                self.say(f"{self._seconds()} {self._phase}")
        elif line.startswith("Installing collected packages:"):
            self._phase, self._packages = f"installing {line.count(',') + 1} packages", 0
            self.say(f"{self._seconds()} {self._phase}")
        elif line.startswith(("ERROR:", "WARNING: Retrying")):  # other warnings are of use where it fails in the end
            self.say(line)

    def _tick(self) -> None:
        """Shows where it is, if that is due."""
        now = self._clock()
        if now - self._last < (_TERMINAL_SECONDS if self._terminal else _QUIET_SECONDS):
            return
        self._last = now
        looked_up = f"{self._packages} packages looked up, " if self._packages else ""
        text = f"{self._seconds()} {self._phase} ({looked_up}{self._written() / 1e9:.1f} GB written)"
        if self._terminal:
            self._stream.write(f"{self._clear()}{text[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def _seconds(self) -> str:
        return f"[{self._clock() - self._begun:4.0f} s]"

    def _clear(self) -> str:
        return "\r\x1b[K" if self._terminal else ""


def _read(stream: TextIO, lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)
