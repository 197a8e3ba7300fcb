"""ONE state machine from token ids to the text of an answer, for streamed and for whole answers.

    token ids -> bytes -> characters -> stop strings -> text

Every token goes through it alone and costs the same however long the text is, so that the result cannot
depend on how tokens were grouped on their way here.
"""

from __future__ import annotations

import codecs
import hashlib
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
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """No more text comes: what was kept back was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class AnswerText:
    """The text of one answer. `tokens` counts those that made it: all up to the one that completed a stop
    string.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
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
            pieces.append(self._matcher.push(self._detokenizer.push(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """The last text, when the engine has ended the turn."""
        return self._matcher.finish()


def text_digest(text: str) -> bytes:
    """What a HistorySpan carries: equal texts, equal digests."""
    return hashlib.sha256(text.encode()).digest()
