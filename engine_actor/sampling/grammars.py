"""Grammars that answers follow: what is one, and those of one model, compiled.

They are compiled off the owner thread, once for all turns that use them (F288); where an answer stands in its grammar
is a cursor's to know (`grammar_cursor`).

A grammar comes from a stranger. What it may cost is bounded: to compile it, and for one mask, by the library's limits;
to keep it, by the time that it took to compile; for the masks of a turn, by a budget of the cursor's.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine_actor.errors import UnusableGrammar
from engine_actor.options import GrammarKind, GrammarSpec
from engine_actor.sampling.grammar_cursor import Cursor, panics_as, said_shortly
from engine_actor.sampling.json_keys import KeyTokens
from engine_actor.sampling.schema_numbers import unkept_in_lark, unkept_number
from engine_actor.sampling.vocabulary import Vocabulary, Words

LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)  # a state is about 1 kB
KEPT_GRAMMARS = 128
KEPT_SECONDS = 1.0  # of compiling what is kept. A grammar's memory grows with that, by up to 0.5 MB a millisecond
SECONDS_TO_RENEW = 0.05  # of compiling, on the owner thread

# One line, with a space after each comma and colon, as json.dumps and chat templates write it: what a client sends back
# has the tokens that were generated, and no model loses itself in white space. A schema's own options ("x-guidance")
# can't change that.
JSON_STYLE = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}


@lru_cache(maxsize=KEPT_GRAMMARS)
def check_grammar(spec: GrammarSpec) -> None:
    """Raises UnusableGrammar with the reason if it is no grammar, as far as that can be told without a vocabulary: in
    0.3 s at most, which are spent once for each text."""
    with panics_as(partial(UnusableGrammar, spec.kind)):
        reason = LLMatcher.validate_grammar(_grammar_of(spec), limits=LIMITS)
    if reason:
        raise UnusableGrammar(spec.kind, said_shortly(reason))


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Grammar:
    """A compiled grammar at its start. Turns that hold it keep it from being compiled again.

    The lexer's automaton is built as answers need it, and shared by all copies of `matcher`. One that grows beyond its
    limit fails in each of them.
    """

    spec: GrammarSpec
    matcher: LLMatcher
    seconds: float  # of processor time that it took to make


class Grammars:
    """The grammars of one model. `prepare`, `compile` and `find` may be called on any thread, all else belongs to the
    engine's owner.

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
        self._words: Words | None = None
        self._keys: KeyTokens | None = None
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()  # held for moments only: of what follows
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()  # latest last
        self._alive: WeakValueDictionary[GrammarSpec, Grammar] = WeakValueDictionary()

    def prepare(self) -> None:
        """Reads the vocabulary, if there is one, which the first grammar would have to wait for: 0.1 s for 50,000
        tokens, a second for 260,000, in which no other Python thread runs for most of the time."""
        if self._vocabulary is not None and self._eos:
            self._read_vocabulary(self._vocabulary)

    def find(self, spec: GrammarSpec) -> Grammar | None:
        """The grammar, if it is compiled already."""
        with self._lock:
            grammar = self._alive.get(spec)
            if grammar is not None:
                self.reused += 1
                self._keep(grammar)
            return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar at its start. Raises UnusableGrammar with the reason if it can't be used here."""
        if (compiled := self.find(spec)) is not None:
            return compiled
        grammar = self.compile_anew(spec)
        with self._lock:
            self._alive[spec] = grammar
            self._keep(grammar)
        return grammar

    def compile_anew(self, spec: GrammarSpec) -> Grammar:
        """One that shares nothing with any other. Raises as `compile` does."""
        if self._vocabulary is None:
            raise UnusableGrammar(spec.kind, "this engine was given no vocabulary")
        if not self._eos:
            raise UnusableGrammar(spec.kind, "this model has no token that ends an answer")
        tokenizer = self._read_vocabulary(self._vocabulary)
        begun = time.thread_time()
        with panics_as(partial(UnusableGrammar, spec.kind)):
            matcher = LLMatcher(tokenizer, _grammar_of(spec), log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask is the dearest, and shows what allows no token at all
        if matcher.is_error():
            raise UnusableGrammar(spec.kind, said_shortly(matcher.get_error()))
        with self._lock:
            self.compiled += 1
        return Grammar(spec, matcher, time.thread_time() - begun)

    def forget(self, grammar: Grammar) -> None:
        """The next turn that asks for it gets another one."""
        with self._lock:
            for grammars in (self._kept, self._alive):
                if grammars.get(grammar.spec) is grammar:
                    del grammars[grammar.spec]

    def cursor(self, spec: GrammarSpec) -> Cursor:
        """Raises UnusableGrammar as `compile` does."""
        grammar = self.compile(spec)
        assert self._words is not None
        keys = self._keys if spec.writes_json or spec.kind is GrammarKind.JSON_SCHEMA else None
        matcher, trigger = grammar.matcher.deep_copy(), spec.trigger.encode()
        return Cursor(matcher, lambda: self._renewed(grammar), self._words, trigger, keys)

    def _renewed(self, grammar: Grammar) -> LLMatcher | None:
        """Another copy of it, with an automaton of its own. Not if that takes longer than a step: then only turns that
        begin from now on get another one."""
        self.forget(grammar)
        return self.compile_anew(grammar.spec).matcher if grammar.seconds <= SECONDS_TO_RENEW else None

    def _keep(self, grammar: Grammar) -> None:
        """As the latest one. It stays even if it alone is more than may be kept."""
        self._kept[grammar.spec] = grammar
        self._kept.move_to_end(grammar.spec)
        seconds = sum(cached.seconds for cached in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > KEPT_GRAMMARS or seconds > KEPT_SECONDS):
            seconds -= self._kept.popitem(last=False)[1].seconds

    def _read_vocabulary(self, vocabulary: Callable[[], Vocabulary]) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._words = Words(vocabulary(), self._vocab_size, self._eos[0])
                self._keys = KeyTokens(self._words.tokens, self._words.special)
                wrapper = TokenizerWrapper(self._words)
                self._tokenizer = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos)
            return self._tokenizer


def _grammar_of(spec: GrammarSpec) -> str:
    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.data)
    if spec.kind is GrammarKind.LARK:
        unkept = unkept_in_lark(spec.data)
    else:
        try:
            unkept = unkept_number(json.loads(spec.data))
        except RecursionError:
            unkept = "it is nested too deeply"
        except ValueError as error:
            unkept = f"it is no JSON: {error}"
    if unkept is not None:
        raise UnusableGrammar(spec.kind, unkept)
    if spec.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(spec.data)
    try:
        return LLMatcher.grammar_from_json_schema(spec.data, overrides=JSON_STYLE)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnusableGrammar(spec.kind, said_shortly(str(error))) from None
