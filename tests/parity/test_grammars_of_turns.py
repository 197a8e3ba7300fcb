"""Answers that follow a grammar (S), over the synthetic model with a vocabulary of letters."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.engine import Engine
from engine_actor.errors import GrammarFailed, InvalidCall, InvalidOption, RetryableStepError, UnusableGrammar
from engine_actor.options import GrammarKind, GrammarSpec, SamplingParams, TurnOptions
from engine_actor.requests.events import EngineEvent, ErrorCode
from engine_actor.requests.outcomes import StepOutcome
from engine_actor.requests.record import FinishReason
from engine_actor.requests.request import Request
from engine_actor.sampling.grammar_cursor import Cursor
from engine_actor.sampling.grammars import Grammars
from tests.support.doubles import SyntheticDecoder
from tests.support.engine_view import record_of
from tests.support.engines import engine_of
from tests.support.grammars import EOS, IDS, allowed, encode, letters, regex, spell

PROMPT = encode("say")


class Chatty(SyntheticDecoder):
    """Every token has a logit of its own, which depends on the whole sequence; `loud` ones are preferred."""

    loud: tuple[int, ...] = ()

    def row_logits(self, sequence: list[int]) -> np.ndarray:
        seed = hash(tuple(sequence)) % 2**32
        row = np.random.default_rng(seed).normal(size=self.manifest.vocab_size).astype(np.float32)
        row[list(self.loud)] += 20
        return row


def chatty(decoder: SyntheticDecoder | None = None, **config: Any) -> Engine:
    config = {"num_blocks": 64, "block_size": 4, "max_batch_size": 8, "prefix_reuse": False} | config
    return engine_of(decoder or Chatty(), vocabulary=letters, **config)


def begin(engine: Engine, spec: GrammarSpec | None, prompt: list[int] = PROMPT, **options: Any) -> Request:
    request = engine.create_request()
    options.setdefault("max_generated_tokens", 12)
    request.begin_turn(prompt, TurnOptions(grammar=spec, **options))
    return request


def finish(engine: Engine, max_events: int = 1000) -> None:
    for _ in range(1000):
        if not engine.has_pending_requests():
            return
        engine.run(max_events)
        engine.check_integrity()
    raise AssertionError("still busy")


def answer(request: Request, prompt: list[int] = PROMPT) -> str:
    return spell(request.tokens[len(prompt) :])


def alone(spec: GrammarSpec | None, **options: Any) -> str:
    engine = chatty()
    request = begin(engine, spec, **options)
    finish(engine)
    return answer(request)


@pytest.mark.parity("F283", scenario="GD-04")
def test_turns_with_different_grammars_and_without_one_run_in_one_batch() -> None:
    engine = chatty()
    digits, words, plain = regex("[0-9]{3}"), GrammarSpec(GrammarKind.LARK, 'start: "yes" | "no"'), None
    requests = [begin(engine, spec) for spec in (digits, words, plain)]
    finish(engine)
    assert re.fullmatch("[0-9]{3}", answer(requests[0]))
    assert answer(requests[1]) in ("yes", "no")
    assert [answer(request) for request in requests] == [alone(digits), alone(words), alone(plain)]
    assert [request.finish_reason for request in requests[:2]] == [FinishReason.EOS, FinishReason.EOS]


@pytest.mark.parity("F284")
def test_a_grammar_cannot_change_under_its_turn() -> None:
    spec = regex("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.data = "b"  # type: ignore[misc]


@pytest.mark.parity("F285", scenario="GD-02")
def test_a_letter_that_the_model_does_not_want() -> None:
    decoder = Chatty()
    decoder.loud = (IDS["z"], IDS["q"])
    engine = chatty(decoder)
    request = begin(engine, regex("!a"))
    finish(engine)
    assert answer(request) == "!a"


@pytest.mark.parity("F285")
@pytest.mark.parametrize("failing_step", range(4))
def test_a_step_that_is_rolled_back_moves_no_cursor(failing_step: int) -> None:
    spec = regex("(ab|12|no)+x")
    decoder = Chatty()
    engine = chatty(decoder)
    request = begin(engine, spec)
    for step in range(100):
        if not engine.has_pending_requests():
            break
        if step == failing_step:
            decoder.fail_next = lambda: RetryableStepError("try again")
        engine.run(1000)
        assert (engine.last_report.outcome is StepOutcome.RETRYABLE_BATCH_ABORT) == (step == failing_step)
    assert answer(request) == alone(spec)


@pytest.mark.parity("F285")
def test_draining_events_one_by_one_moves_no_cursor() -> None:
    spec = regex("(ab|12|no)+x")
    engine = chatty()
    requests = [begin(engine, spec) for _ in range(3)]
    finish(engine, max_events=1)
    assert [answer(request) for request in requests] == [alone(spec)] * 3


@pytest.mark.parity("F286")
def test_there_is_no_option_for_forced_tokens() -> None:
    assert {field.name for field in dataclasses.fields(GrammarSpec)} == {"kind", "data", "trigger", "writes_json"}


@pytest.mark.parity("F287")
@pytest.mark.parametrize(("kind", "data"), [("", "a"), (GrammarKind.REGEX, "")])
def test_type_and_data_come_together(kind: Any, data: str) -> None:
    with pytest.raises(InvalidOption, match="guidance type and data must be provided together"):
        GrammarSpec(kind, data)


@pytest.mark.parity("F288")
def test_a_grammar_is_compiled_once_and_its_cursors_are_apart() -> None:
    grammars = Grammars(letters, 64, frozenset({EOS}))
    first, second = grammars.cursor(regex("ab?")), grammars.cursor(regex("ab?"))
    assert (grammars.compiled, grammars.reused) == (1, 1)
    start = allowed(second, [])
    assert np.flatnonzero(allowed(first, [IDS["a"]])).tolist() == sorted([IDS["b"], EOS])
    assert (allowed(second, []) == start).all()


def test_more_grammars_than_are_kept_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_actor.sampling.grammars.KEPT_GRAMMARS", 2)
    grammars = Grammars(letters, 64, frozenset({EOS}))
    for pattern in "abacab":  # a and c are kept when b comes back
        grammars.compile(regex(pattern))
    assert (grammars.compiled, grammars.reused) == (4, 2)


@pytest.mark.parity(
    "F289", stand_in="each mask is made in its row's turn: no job beside the forward pass, and no copy to a device"
)
def test_rows_without_a_grammar_and_parts_of_prompts_are_let_through() -> None:
    long_prompt = encode("abcdefghijklmnopqrstuvwxyz" * 2)
    engine = chatty(max_scheduled_tokens=8, chunk_size=5)
    guided = begin(engine, regex("[a-c]{6}"), long_prompt)
    plain = begin(engine, None)
    finish(engine)
    whole = chatty()
    same = begin(whole, regex("[a-c]{6}"), long_prompt)
    finish(whole)
    assert guided.tokens == same.tokens and re.fullmatch("[a-c]{6}", answer(guided, long_prompt))
    assert answer(plain) == alone(None)


@pytest.mark.parity(
    "F290", stand_in="masks are not made ahead: a mask that fails rolls its own step back, and the next step makes it"
)
def test_a_mask_that_could_not_be_made_once_is_made_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Cursor.mask
    failures = iter([RuntimeError("no thread for it")])

    def once(cursor: Cursor, tokens: list[int]) -> Any:
        if len(tokens) == 2 and (failure := next(failures, None)) is not None:
            raise failure
        return made(cursor, tokens)

    monkeypatch.setattr(Cursor, "mask", once)
    engine = chatty()
    request = begin(engine, regex("(ab|12|no)+x"))
    finish(engine)
    assert engine.metrics.retryable_aborts == 1
    monkeypatch.undo()
    assert answer(request) == alone(regex("(ab|12|no)+x"))


@pytest.mark.parity(
    "F291", stand_in="the turn ends with its error at once (C37) instead of failing in every step", scenario="GD-05"
)
def test_a_grammar_that_gives_up_ends_its_own_turn_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn ends instead of failing for ever: the rest of the batch would wait for it."""
    made = Cursor.mask

    def limited(cursor: Cursor, tokens: list[int]) -> Any:
        if len(tokens) >= 2 and tokens[0] == IDS["b"]:
            raise GrammarFailed("too many states")
        return made(cursor, tokens)

    monkeypatch.setattr(Cursor, "mask", limited)
    engine = chatty()
    bad, good = begin(engine, regex("b[a-z]{8}")), begin(engine, regex("c[a-z]{8}"))
    events: list[EngineEvent] = []
    while engine.has_pending_requests():
        events += engine.run(1000)
    ended = next(event for event in events if event.finish_reason is FinishReason.FAILED)
    assert (ended.request_id, ended.error_code) == (bad.id, ErrorCode.GRAMMAR)
    assert ended.message == "the answer's grammar failed: too many states"
    assert re.fullmatch("b[a-z]", answer(bad)[:2]) and len(bad.tokens) == len(PROMPT) + 2
    assert re.fullmatch("c[a-z]{8}", answer(good))


def test_a_grammar_that_the_library_gives_up_on_ends_its_turn() -> None:
    cursor = Grammars(letters, 64, frozenset({EOS})).cursor(regex("ab"))
    for _ in range(2):
        with pytest.raises(GrammarFailed):
            cursor.mask([IDS["z"]])  # a token that its own mask did not have


@pytest.mark.parity("F292")
def test_a_mask_has_a_bit_for_each_column_of_the_logits() -> None:
    cursor = Grammars(letters, 65, frozenset({EOS})).cursor(regex("(?s:.*)"))
    mask = cursor.mask([])
    assert mask is not None and mask.shape == (12,)
    start = allowed(cursor, [], 65)
    assert not start[0] and start[EOS] and start[IDS["a"]]
    assert not start[len(letters().tokens) :].any(), "an id without a token was let through"


@pytest.mark.parity("F293", scenario="GD-06")
def test_a_second_turn_begins_its_grammar_anew() -> None:
    engine = chatty()
    request = begin(engine, regex("[0-9]{4}"))
    finish(engine)
    begun = len(request.tokens) + len(PROMPT)
    request.begin_turn(PROMPT, TurnOptions(8, grammar=regex("[0-9]{4}")))
    finish(engine)
    assert re.fullmatch("[0-9]{4}", spell(request.tokens[begun:]))
    request.begin_turn(PROMPT, TurnOptions(8))
    finish(engine)
    assert record_of(request).grammar_cursor is None


@pytest.mark.parity("F296", lacks="there is no n-gram rule that could refuse drafts")
def test_drafts_are_refused_beside_a_grammar() -> None:
    engine = chatty(Chatty(drafts=8))
    request = begin(engine, regex("[a-z]+"))
    engine.run(1000)
    engine.run(1000)
    with pytest.raises(InvalidCall, match="grammar"):
        request.set_draft_tokens([IDS["a"]])


@pytest.mark.parametrize("refused", [{"ignore_eos": True}, {"min_generated_tokens": 3}])
def test_a_grammar_says_when_an_answer_ends(refused: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(refused))):
        TurnOptions(8, grammar=regex("a"), **refused)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (regex("(a"), "unclosed group"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "objec"}'), "objec"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), "it is no JSON"),
        (GrammarSpec(GrammarKind.LARK, 'start: "a" b'), "unknown name"),
        (GrammarSpec(GrammarKind.LARK, "start: <|nothing|>"), "unknown special token"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason_and_changes_nothing(spec: GrammarSpec, words: str) -> None:
    engine = chatty()
    request = engine.create_request()
    with pytest.raises(UnusableGrammar, match=words):
        request.begin_turn(PROMPT, TurnOptions(grammar=spec))
    request.begin_turn(PROMPT, TurnOptions(2))
    finish(engine)
    assert request.turn_id == 1


def test_an_engine_without_a_vocabulary_says_so() -> None:
    engine = engine_of(Chatty(), num_blocks=8)
    with pytest.raises(UnusableGrammar, match="no vocabulary"):
        engine.create_request().begin_turn(PROMPT, TurnOptions(grammar=regex("a")))


def test_a_branch_follows_the_grammar_from_its_own_beginning() -> None:
    engine = chatty()
    first = begin(engine, regex("[a-f]{6}"), sampling=SamplingParams(temperature=1.0, seed=1))
    engine.run(1000)
    second = first.fork(len(PROMPT))
    second.begin_turn(PROMPT[-1:], TurnOptions(12, SamplingParams(temperature=1.0, seed=2), grammar=regex("[a-f]{6}")))
    finish(engine)
    assert re.fullmatch("[a-f]{6}", answer(first))
    assert re.fullmatch("[a-f]{6}", spell(second.tokens[len(PROMPT) + 1 :]))


def test_a_preempted_turn_goes_on_in_its_grammar() -> None:
    engine = chatty(num_blocks=9, max_batch_size=4)
    spec = regex("([a-c]{2}[0-9])+!")
    running = [begin(engine, spec, max_generated_tokens=14) for _ in range(4)]
    answers = []
    while running:
        engine.run(1000)
        for request in [request for request in running if request.finish_reason is not None]:
            answers.append(answer(request))
            running.remove(request)
            request.close()
    assert engine.metrics.preemptions > 0
    assert answers == [alone(spec, max_generated_tokens=14)] * 4


def test_a_turn_that_another_engine_had_begun_goes_on_in_its_grammar() -> None:
    spec, sampling = regex("([a-c]{2}[0-9])+!"), SamplingParams(temperature=1.0, seed=5)
    engine = chatty()
    whole = begin(engine, spec, sampling=sampling)
    finish(engine)
    said = whole.tokens[len(PROMPT) :]
    for cut in range(len(said)):
        other = chatty()
        options = {"sampling": sampling, "resumed_tokens": cut}
        resumed = begin(other, spec, PROMPT + said[:cut], **options)
        finish(other)
        assert (resumed.tokens, resumed.finish_reason) == (whole.tokens, whole.finish_reason)


patterns = st.recursive(
    st.sampled_from(["a", "b", "[c-f]", "ab", "yes", "no", "[0-9]", "!"]),
    lambda parts: st.one_of(
        st.builds("{}{}".format, parts, parts),
        st.builds("({}|{})".format, parts, parts),
        st.builds("({}){}".format, parts, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])),
    ),
    max_leaves=6,
)


def test_before_its_trigger_a_grammar_lets_every_token_through_and_then_no_wrong_one() -> None:
    grammar = 'start: TEXT | begun "12" "x"*\nbegun[lazy]: TEXT "!a"\nTEXT: /(.|\\n)*/\n'
    spec = GrammarSpec(GrammarKind.LARK, grammar, trigger="!a")
    grammars = Grammars(letters, 64, frozenset({EOS}))
    for text in ("", "ab", "z no", "!", "a!", "!a", "!a1", "!a12", "x!a12xx"):
        free = grammars.cursor(spec)
        masked = grammars.cursor(dataclasses.replace(spec, trigger=""))
        wanted = allowed(masked, encode(text))
        if text.endswith("!") or "!a" in text:
            assert (allowed(free, encode(text)) == wanted).all()
        else:
            assert free.mask(encode(text)) is None and wanted[[*IDS.values(), EOS]].all()


def test_what_is_no_text_may_come_before_a_trigger() -> None:
    """Without a mask the model can choose a control token, or an id without a token."""
    spec = GrammarSpec(GrammarKind.LARK, 'start: begun "x"\nbegun[lazy]: /(.|\\n)*/ "!a"\n', trigger="!a")
    cursor = Grammars(letters, 64, frozenset({EOS})).cursor(spec)
    assert np.flatnonzero(allowed(cursor, [IDS["b"], 0, 63, IDS["!a"]])).tolist() == [IDS["x"]]


@given(st.lists(st.tuples(patterns, st.floats(0, 2), st.integers(0, 2**64 - 1)), min_size=1, max_size=4))
def test_every_answer_matches_its_grammar_and_is_the_one_it_would_be_alone(
    asked: list[tuple[str, float, int]],
) -> None:
    engine = chatty()
    turns: list[tuple[str, dict[str, Any]]] = [
        (pattern, {"sampling": SamplingParams(temperature=temperature, seed=seed), "max_generated_tokens": 10})
        for pattern, temperature, seed in asked
    ]
    requests = [begin(engine, regex(pattern), **options) for pattern, options in turns]
    finish(engine)
    for request, (pattern, options) in zip(requests, turns, strict=True):
        if request.finish_reason is FinishReason.EOS:
            assert re.fullmatch(pattern, answer(request))
        else:
            assert request.finish_reason is FinishReason.MAX_GENERATED_TOKENS
        assert answer(request) == alone(regex(pattern), **options)
