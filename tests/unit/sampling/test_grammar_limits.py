"""What a grammar may cost: its maker, the other turns that use it, and the engine's thread."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from engine_actor.errors import GrammarFailed, UnusableGrammar
from engine_actor.options import GrammarSpec
from engine_actor.sampling import grammar_cursor
from engine_actor.sampling import grammars as grammars_module
from engine_actor.sampling.grammar_cursor import Cursor
from engine_actor.sampling.grammars import Grammars, check_grammar
from engine_actor.sampling.vocabulary import Vocabulary
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.engine_view import READ_ANSWER
from tests.support.grammars import EOS, IDS, allowed, encode, lark, letters, regex, schema

GROWING = regex("y|x[ab]*a[ab]{9}")  # what may follow depends on the last ten letters, so there are 1,024 cases


def grammars() -> Grammars:
    return Grammars(letters, 64, frozenset({EOS}))


def read(cursor: Cursor, text: str) -> NDArray[np.bool_]:
    """Letter by letter, as an engine does. The last mask."""
    ids = encode(text)
    for count in range(len(ids)):
        cursor.mask(ids[:count])
    return allowed(cursor, ids)


def letters_of(seed: int, count: int) -> str:
    return "x" + "".join(np.random.default_rng(seed).choice(["a", "b"], count))


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    """Where GROWING has room for an answer of ten letters, and not for one of fifty."""
    monkeypatch.setattr(grammars_module, "LIMITS", LLParserLimits(max_lexer_states=80, verbose_errors=False))
    return grammars()


def test_an_answer_that_fills_the_automaton_ends_no_other_one(tight: Grammars) -> None:
    """Copies of a grammar share it, and one that is full fails in all of them."""
    before, long = tight.cursor(GROWING), tight.cursor(GROWING)
    before.mask([])
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="too many states"):
            read(long, letters_of(1, 50))
    for cursor in (before, tight.cursor(GROWING)):
        assert np.flatnonzero(read(cursor, "y")).tolist() == [EOS]


def test_answers_that_are_short_never_fill_it_together(tight: Grammars) -> None:
    for seed in range(50):
        alone = read(grammars().cursor(GROWING), letters_of(seed, 10))
        assert (read(tight.cursor(GROWING), letters_of(seed, 10)) == alone).all()
    assert tight.compiled > 1, "it never was full"


def test_a_grammar_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cursor, "SECONDS_A_TURN", 0.01)
    cursor = grammars().cursor(lark('start: s\ns: s s | s s s | "a" | ""'))  # cubic in the answer's length, and worse
    answer: list[int] = []
    with pytest.raises(GrammarFailed, match="to find out what may follow"):
        while len(answer) < 300:
            cursor.mask(answer)
            answer.append(IDS["a"])
    with pytest.raises(GrammarFailed):
        cursor.mask(answer)


def test_what_is_kept_is_bounded_by_the_time_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    made = grammars()
    one = made.compile(regex("a{1,50}"))
    monkeypatch.setattr(grammars_module, "KEPT_SECONDS", one.seconds * 0.9)
    other = made.compile(regex("b{1,50}"))
    assert made.compile(regex("b{1,50}")) is other  # the latest stays, whatever it took
    assert made.compile(regex("a{1,50}")) is one  # it is held here, as a turn would
    compiled = made.compiled
    del one, other
    made.compile(regex("c{1,50}"))
    made.compile(regex("a{1,50}"))
    assert made.compiled == compiled + 2


@pytest.mark.parametrize("nothing", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_grammar_that_no_text_matches_is_refused(nothing: object) -> None:
    with pytest.raises(UnusableGrammar, match="no text matches it"):
        grammars().compile(schema(nothing))


@pytest.mark.parametrize(
    "panics", [regex(r"((\p{L}|é)|\w)"), schema({"type": "string", "pattern": r"^((\p{L}|é)|\w)$"})]
)
def test_a_grammar_that_the_library_panics_over_is_refused(panics: GrammarSpec) -> None:
    """In Rust's sense, which reaches Python as what is no Exception. Where it was mended the grammar is one."""
    for call in (check_grammar, grammars().compile):
        try:
            call(panics)
        except UnusableGrammar as error:
            assert error.reason == "the library that reads it failed"


def test_a_panic_while_an_answer_is_read_ends_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(cursor: Cursor, answer: list[int]) -> None:
        LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(r"((\p{L}|é)|\w)"))
        raise type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})("where that was mended")

    monkeypatch.setattr(Cursor, READ_ANSWER, panic)
    with pytest.raises(GrammarFailed, match="the library that reads it failed"):
        grammars().cursor(regex("a")).mask([])


def test_two_threads_that_need_the_first_grammar_read_the_vocabulary_once() -> None:
    reads = []

    def slow() -> Vocabulary:
        reads.append(threading.get_ident())
        time.sleep(0.05)
        return letters()

    made = Grammars(slow, 64, frozenset({EOS}))
    with ThreadPoolExecutor(4) as pool:
        compiled = list(pool.map(made.compile, [regex(c) for c in "abab"]))
    assert len(reads) == 1
    assert {grammar.spec.data for grammar in compiled} == {"a", "b"}
    for letter in "ab":
        assert np.flatnonzero(allowed(made.cursor(regex(letter)), [])).tolist() == sorted({IDS[letter]})


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def real(tokenizer: Tokenizer) -> Grammars:
    made = Grammars(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.eos_token_ids)
    made.prepare()
    return made


@pytest.mark.parametrize(
    "own", [{"whitespace_pattern": "[ ]{0,9}"}, {"whitespace_flexible": True}, {"item_separator": ";"}]
)
def test_a_schema_cannot_ask_for_other_white_space(real: Grammars, tokenizer: Tokenizer, own: object) -> None:
    wanted = {"type": "array", "items": {"enum": [1, 2]}}
    usual, changed = real.cursor(schema(wanted)), real.cursor(schema(wanted | {"x-guidance": own}))
    answer: list[int] = []
    while len(answer) < 8 and not set(answer) & tokenizer.eos_token_ids:
        usually = allowed(usual, answer, tokenizer.vocab_size)
        assert (allowed(changed, answer, tokenizer.vocab_size) == usually).all()
        answer.append(int(np.flatnonzero(usually)[-1]))
    assert len(answer) > 2


def _nested(depth: int) -> object:
    return {"type": "array", "items": _nested(depth - 1)} if depth else {"type": "string"}


def _doubling(depth: int) -> dict[str, object]:
    ref = {"$ref": f"#/$defs/d{depth - 1}"}
    pair = {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a", "b"]}
    return _doubling(depth - 1) | {f"d{depth}": pair} if depth else {"d0": {"type": "string"}}


_EITHER: list[object] = [{"anyOf": [{"properties": {f"x{i}": {}}}, {"properties": {f"y{i}": {}}}]} for i in range(30)]
_WORDS = ["abc", "bcd", "cde", "def", "efg", "fgh", "ghi", "hij", "ijk"]
NASTY: dict[str, GrammarSpec] = {
    "many ways to repeat": regex("((a*)*)*b"),
    "a long run": regex("a{100000}"),
    "a very long run": regex("(abcdefg){300000}"),
    "runs of runs": regex("(a{1,1000}){1,1000}"),
    "optional ones": regex("(a?){500}a{500}"),
    "a look back": regex("(?s:.)*a(?s:.){20}"),
    "wide classes": regex("[\\p{L}\\p{N}]{1,500}"),
    "ten thousand words": regex("|".join(f"w{i}x" for i in range(10_000))),
    "a huge enum": schema({"enum": [f"word {i}" for i in range(10_000)]}),
    "a huge constant": schema({"const": "x y" * 60_000}),
    "many properties": schema({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}, "type": "object"}),
    "deep nesting": schema(_nested(60)),
    "deeper nesting": schema(_nested(300)),
    "doubling references": schema({"$defs": _doubling(60), "$ref": "#/$defs/d60"}),
    "choices of choices": schema({"allOf": _EITHER}),
    "patterns at once": schema({"allOf": [{"type": "string", "pattern": f".*{word}.*"} for word in _WORDS]}),
    "a large step": schema({"type": "integer", "multipleOf": 99_991}),
    "a long array": schema({"type": "array", "minItems": 10**9}),
    "ambiguous": lark('start: s\ns: s s | s s s | "a" | ""'),
    "empty rules": lark("start: r0\n" + "".join(f"r{i}: r{i + 1}? r{i + 1}?\n" for i in range(40)) + 'r40: "x"?'),
    "rules that double": lark("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "x"'),
    "lexemes alike": lark(
        f"start: ({'|'.join(f'T{i}' for i in range(100))})+\n"
        + "".join(f"T{i}: /[a-z0-9]*{chr(97 + i % 26)}[a-z0-9]{{{i % 20}}}/\n" for i in range(100))
    ),
    "complements": lark("start: T\nT: " + " & ".join(f"~/(?s:.*){a}{b}(?s:.*)/" for a in "abcdef" for b in "ghijkl")),
    "brackets": lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "json inside": lark("start: j\nj: %json " + json.dumps({"enum": list(range(5000))})),
    "options": lark('%llguidance {"allow_invalid_utf8": true, "no_forcing": true}\nstart: /(?s:.*)/'),
}  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_grammar_is_refused_or_served_within_bounds(real: Grammars, tokenizer: Tokenizer, name: str) -> None:
    """In seconds of this thread's processor time, an order of magnitude above what is measured on a slow machine."""
    asked, begun = NASTY[name], time.thread_time()
    try:
        check_grammar(asked)
        assert time.thread_time() - begun < 3
        cursor = real.cursor(asked)
    except UnusableGrammar as error:
        assert error.reason and time.thread_time() - begun < 6
        return
    assert time.thread_time() - begun < 6
    rng = np.random.default_rng(0)
    answer: list[int] = []
    begun = time.thread_time()
    try:
        for _ in range(150):
            goes_on = allowed(cursor, answer, tokenizer.vocab_size)
            goes_on[list(tokenizer.eos_token_ids)] = False
            if not goes_on.any():
                break
            choices = np.flatnonzero(goes_on)
            answer.append(int(choices[rng.integers(len(choices))]))
    except GrammarFailed as error:
        assert str(error)
    spent = time.thread_time() - begun
    assert spent < grammar_cursor.SECONDS_A_TURN + 3, f"{spent:.1f} s for {len(answer)} tokens"
