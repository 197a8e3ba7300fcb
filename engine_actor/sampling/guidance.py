"""What an answer may be: a grammar that it follows, as a mask over the vocabulary for each next token.

A cursor is a function of the grammar and of the answer's tokens so far. It remembers how far it has read, and reads
committed tokens only: a rollback has nothing to restore, draining events moves nothing, and a turn that was preempted,
forked or taken over from another engine reads its tokens again (F283 to F285, F293).

Grammars are compiled off the owner thread, once for all turns that use them (F288). A cursor's mask is made while the
model may still be running on its device: it needs no logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine_actor.errors import GuidanceFailed, UnusableGrammar
from engine_actor.options import Guidance, GuidanceKind

KEPT_GRAMMARS = 128
LONGEST_REASON = 500  # characters of what the library says of a grammar

# One line, with a space after each comma and colon, as json.dumps and chat templates write it: what a client sends back
# has the tokens that were generated, and no model loses itself in white space.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of a tokenizer.

    tokens   the bytes of each token by id
    special  control tokens: no text is made of them
    encode   ids of a text that stands in the middle of a sequence
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    encode: Callable[[str], list[int]]


def check_grammar(guidance: Guidance) -> None:
    """Raises UnusableGrammar with the reason if it is no grammar, as far as that can be told without a vocabulary."""
    if reason := LLMatcher.validate_grammar(_grammar_of(guidance)):
        raise UnusableGrammar(guidance.kind, _shortened(reason))


class Grammars:
    """The grammars of one model. `compile` may be called on any thread, all else belongs to the engine's owner.

    compiled, reused    grammars made, and found again, since the start
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary] | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`vocab_size`: columns of the logits; ids without a token may never be chosen."""
        self.compiled = self.reused = 0
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._words: _Words | None = None
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[Guidance, LLMatcher] = OrderedDict()

    def compile(self, guidance: Guidance) -> LLMatcher:
        """The grammar at its start. Raises UnusableGrammar with the reason if it can't be used here."""
        with self._lock:
            if (known := self._known.get(guidance)) is not None:
                self._known.move_to_end(guidance)
                self.reused += 1
                return known
        matcher = LLMatcher(self._tokenizer_for(guidance), _grammar_of(guidance), log_level=0)
        if matcher.is_error():
            raise UnusableGrammar(guidance.kind, _shortened(matcher.get_error()))
        with self._lock:
            self.compiled += 1
            self._known[guidance] = matcher
            if len(self._known) > KEPT_GRAMMARS:
                self._known.popitem(last=False)
        return matcher

    def cursor(self, guidance: Guidance) -> Cursor:
        """Raises UnusableGrammar as `compile` does."""
        matcher = self.compile(guidance).deep_copy()
        assert self._words is not None
        return Cursor(matcher, self._vocab_size, self._words, guidance.trigger.encode())

    def _tokenizer_for(self, guidance: Guidance) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if self._vocabulary is None:
                    raise UnusableGrammar(guidance.kind, "this engine was given no vocabulary")
                if not self._eos:
                    raise UnusableGrammar(guidance.kind, "this model has no token that ends an answer")
                self._words = _Words(self._vocabulary(), self._vocab_size, self._eos[0])
                wrapper = TokenizerWrapper(self._words)
                self._tokenizer = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos)
            return self._tokenizer


class Cursor:
    """Where one answer stands in its grammar."""

    __slots__ = ("_awaited", "_mask", "_matcher", "_read", "_tail", "_vocab_size", "_words")

    def __init__(self, matcher: LLMatcher, vocab_size: int, words: _Words, trigger: bytes) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = words
        self._awaited = trigger  # empty once the answer has it
        self._tail = b""  # as much of the answer's end as may begin the trigger
        self._read = 0
        self._mask = np.zeros((vocab_size + 31) // 32, np.int32)  # F292

    @property
    def read(self) -> int:
        """Tokens of the answer that it has read."""
        return self._read

    def allowed(self, answer: Sequence[int]) -> NDArray[np.bool_] | None:
        """bool [vocab_size]: which tokens may follow; None: any. `answer`: all committed tokens of it, which go on from
        those given before. Raises GuidanceFailed, now and for ever, where the library gives up (F291)."""
        for token in answer[self._read :]:
            self._read_one(token)
        self._read = len(answer)
        if not self._free:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise GuidanceFailed(_shortened(self._matcher.get_error()))
        if self._free:
            return None
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    @property
    def _free(self) -> bool:
        """The trigger has not even begun."""
        return bool(self._awaited) and not self._tail

    def _read_one(self, token: int) -> None:
        if not self._awaited:
            self._matcher.consume_token(token)
            return
        text = self._words.tokens[token]
        if not text or token in self._words.special:
            return  # chosen without a mask; no part of the text
        self._matcher.consume_token(token)
        tail = self._tail + text
        if self._awaited in tail:
            self._awaited = b""
            return
        longest = min(len(tail), len(self._awaited) - 1)
        begun = (n for n in range(longest, 0, -1) if self._awaited.startswith(tail[-n:]))
        self._tail = tail[len(tail) - next(begun, 0) :]


class _Words:
    """A vocabulary as the library reads it. It asks for the ids of a text where only that text can follow."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_id: int) -> None:
        known = list(vocabulary.tokens[:vocab_size])
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special = vocabulary.special
        self.special_token_ids = sorted(i for i in vocabulary.special if i < vocab_size)
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _grammar_of(guidance: Guidance) -> str:
    if guidance.kind is GuidanceKind.REGEX:
        return LLMatcher.grammar_from_regex(guidance.data)
    if guidance.kind is GuidanceKind.LARK:
        return LLMatcher.grammar_from_lark(guidance.data)
    try:
        return LLMatcher.grammar_from_json_schema(guidance.data, overrides=JSON_STYLE)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnusableGrammar(guidance.kind, _shortened(str(error))) from None


def _shortened(reason: str) -> str:
    """The first paragraph: what follows is the library's own state."""
    text = " ".join(reason.split("<state>")[0].split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + "..."
