"""Where one answer stands in its grammar: which tokens may follow.

A cursor is a function of the grammar and of the answer's tokens so far. It remembers how far it has read, and reads
committed tokens only: a rollback has nothing to restore, draining events moves nothing, and a turn that was preempted,
forked or taken over from another engine reads its tokens again (F283 to F285, F293). Its mask is made while the model
may still be running on its device: it needs no logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher

from engine_actor.errors import GrammarFailed
from engine_actor.sampling.json_keys import KeyTokens, KeyWatch
from engine_actor.sampling.logits_processors import bytes_of_bits
from engine_actor.sampling.sample_row import Bits
from engine_actor.sampling.vocabulary import Words

logger = logging.getLogger("moorage.engine")

# Of the owner thread's processor time for masks: so much in all, and so much more for each token and each entry of the
# vocabulary. That is 2 ms a token for SmolLM2 and 10 ms for Gemma 3; most grammars need a fiftieth of it.
SECONDS_A_TURN = 0.5
SECONDS_AN_ENTRY = 40e-9
LONGEST_REASON = 500  # characters of what the library says of a grammar


class Cursor:
    """`renewed` is asked once, where the library gives up: for another matcher at its start that shares nothing with
    others, or None."""

    __slots__ = (
        "_awaited",
        "_bits",
        "_keys",
        "_matcher",
        "_read",
        "_renewed",
        "_spent",
        "_tail",
        "_trigger",
        "_watch",
        "_words",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        renewed: Callable[[], LLMatcher | None],
        words: Words,
        trigger: bytes,
        keys: KeyTokens | None,
    ) -> None:
        """`trigger`: see GrammarSpec. `keys`: those of the vocabulary, where the answer is JSON."""
        self._renewed: Callable[[], LLMatcher | None] | None = renewed
        self._words = words
        self._trigger = trigger
        self._keys = keys
        self._spent = 0.0  # seconds of processor time
        self._bits = np.zeros(bytes_of_bits(len(words.tokens)), np.uint8)  # F292
        self._start(matcher)

    def _start(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._watch = None if self._keys is None else KeyWatch(self._keys)
        self._awaited = self._trigger  # empty once the answer has it
        self._tail = b""  # as much of the answer's end as may begin the trigger
        self._read = 0

    @property
    def read(self) -> int:
        """Tokens of the answer that it has read."""
        return self._read

    def mask(self, answer: Sequence[int]) -> Bits | None:
        """Which tokens may follow; None: any. It is the cursor's own, and holds until the next call. `answer`: all
        committed tokens of it, which go on from those given before. Raises GrammarFailed, now and for ever, where the
        library gives up (F291), or the grammar takes the engine too much time."""
        begun = time.thread_time()
        with panics_as(GrammarFailed):
            self._advance(answer)
            if self._matcher.is_error() and self._renewed is not None:
                # Copies of a matcher share the automaton of its lexer, and one that is full fails in each of them.
                # Whether this answer or others have filled it is not known, and its fate must not depend on them.
                renew, self._renewed = self._renewed, None
                if (other := renew()) is not None:
                    self._start(other)
                    self._advance(answer)
        if self._matcher.is_error():
            raise GrammarFailed(said_shortly(self._matcher.get_error()))
        self._spent += time.thread_time() - begun
        if self._spent > SECONDS_A_TURN + SECONDS_AN_ENTRY * len(self._words.tokens) * self._read:
            raise GrammarFailed(f"it took {self._spent:.1f} s to find out what may follow {self._read} tokens")
        return None if self._free else self._bits

    def _advance(self, answer: Sequence[int]) -> None:
        """Reads what is new, and makes the mask. After an error the library does neither."""
        for token in answer[self._read :]:
            self._read_one(token)
        self._read = len(answer)
        if not self._free:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            if self._watch is not None:
                self._watch.restrict(self._bits)

    @property
    def _free(self) -> bool:
        """The trigger has not even begun."""
        return bool(self._awaited) and not self._tail

    def _read_one(self, token: int) -> None:
        if not self._awaited:
            self._matcher.consume_token(token)
            if self._watch is not None and token not in self._words.special:
                self._watch.read(self._words.tokens[token])
            return
        text = self._words.tokens[token]
        if not text or token in self._words.special:
            return  # chosen without a mask; no part of the text
        self._matcher.consume_token(token)
        tail = self._tail + text
        if self._awaited in tail:
            if self._watch is not None:
                self._watch.read(tail.partition(self._awaited)[2])
            self._awaited = b""
            return
        longest = min(len(tail), len(self._awaited) - 1)
        begun = (n for n in range(longest, 0, -1) if self._awaited.startswith(tail[-n:]))
        self._tail = tail[len(tail) - next(begun, 0) :]


def said_shortly(reason: str) -> str:
    """What the library says of a grammar, in one line."""
    text = " ".join(reason.removesuffix("<non-verbose/>").split())
    if text == "NoExtensionBias":
        return "no text matches it"
    if text.startswith("panic"):
        return _panicked(reason)
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + "..."


@contextmanager
def panics_as(error_type: Callable[[str], Exception]) -> Iterator[None]:
    """A bug of the library that a grammar brings out comes as an exception that nothing else would stop."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise error_type(_panicked(str(error))) from None


def _panicked(reason: str) -> str:
    logger.error("llguidance: %s", reason)  # where it failed is nobody else's business
    return "the library that reads it failed"
