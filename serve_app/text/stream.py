"""ONE state machine from token ids to the text of an answer, for streamed and for whole answers.

    token ids -> bytes -> characters -> stop strings -> text

Every token goes through it alone and costs the same however long the text is, so that the result cannot
depend on how tokens were grouped on their way here.
"""

from __future__ import annotations

import codecs
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence

from serve_app.text.tokenizer import Tokenizer


class Detokenizer:
    """Characters of a growing sequence of tokens that continues a prompt.

    A character whose bytes are not all there yet is kept back. Bytes that can't be UTF-8 become U+FFFD, as in
    `Tokenizer.decode`; bytes of a last character that never was completed are dropped: the model did not
    finish it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._bytes.special:
            return ""
        return self._decoder.decode(self._bytes[token_id])

    @property
    def unfinished(self) -> bool:
        """The first bytes of a character are here, and the others are not."""
        return bool(self._decoder.getstate()[0])


class StopMatcher:
    """Finds the first stop string to be completed, and keeps back text that may become one.

    Among strings completed by the same character the one that begins first wins; so the cut does not depend
    on how the text arrived.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Text that is safe to show; after a match, what stood before the stop string, and nothing more."""
        if self.matched or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.matched, self._held = True, ""
            return text[: min(matches)[1]]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """No more text comes: what was kept back was no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TokenPlaces:
    """Where in the text each token stands, told when its text is out: all of it, or what a stop string left of it.

    A token's characters are [start, end): those it added, and the one that its last bytes belong to. Tokens of which
    nothing is shown because a stop string was there are never told; they are always the last ones.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self._out: list[int] = []

    def add(self, start: int, end: int) -> None:
        self._waiting.append((start, end))

    def settle(self, shown: int, *, last: bool = False) -> None:
        """`shown` characters of the text are out. `last`: there will be no more."""
        while self._waiting and self._waiting[0][1] <= shown:
            self._out.append(self._waiting.popleft()[0])
        if last:
            self._out += [start for start, _ in self._waiting if start < shown]
            self._waiting.clear()

    def drain(self) -> list[int]:
        """The first character of each token whose text went out since the last call, in order."""
        out, self._out = self._out, []
        return out


class AnswerText:
    """The text of one answer. `tokens` counts those that made it: all up to the one that completed a stop
    string. With `places` it also says which tokens the text so far belongs to.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), places: TokenPlaces | None = None) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._places = places
        self._decoded = self._shown = 0  # characters
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string is complete. Tokens that come later are not looked at."""
        return self._matcher.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens allow to be shown."""
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            text = self._detokenizer.push(token_id)
            pieces.append(self._matcher.push(text))
            if self._places is not None:
                self._place(self._places, len(text), len(pieces[-1]))
        return "".join(pieces)

    def finish(self) -> str:
        """The last text, when the engine has ended the turn."""
        held = self._matcher.finish()
        if self._places is not None:
            # A last character that was never completed is no text, but its tokens were generated.
            self._places.settle(self._decoded + 1, last=True)
        return held

    def _place(self, places: TokenPlaces, decoded: int, shown: int) -> None:
        start = self._decoded
        self._decoded += decoded
        self._shown += shown
        places.add(start, self._decoded + self._detokenizer.unfinished)
        places.settle(self._shown, last=self.stopped)


def text_digest(text: str) -> bytes:
    """What a HistorySpan carries: equal texts, equal digests."""
    return hashlib.sha256(text.encode()).digest()
