"""What changes a row's logits before a token is chosen, and what is told of the chosen one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.errors import InvalidOption
from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.sampling.logits_processors import process
from engine_actor.sampling.logprobs import logprob_of
from engine_actor.sampling.sample_row import RowContext, SampleRow


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def processed(
    logits: np.ndarray, tokens: list[int], generated: int = 0, banned: set[int] | None = None, **params: object
) -> list[float]:
    context, before = RowContext(tokens, generated, frozenset(banned or ())), logits.copy()
    out = process(logits, SamplingParams(**params), context, np.empty(32, np.float32))  # type: ignore[arg-type]
    assert (logits == before).all()
    values: list[float] = out.tolist()
    return values


@pytest.mark.parity("F278", "F279", scenario="LP-01")
def test_penalties_and_bans_change_the_logits_of_what_they_are_for() -> None:
    out = processed(row(4, -2, 3, 5), [0, 1], banned={3}, repetition_penalty=2.0)
    assert out == [2.0, -4.0, 3.0, -math.inf]


def test_a_mask_leaves_what_it_allows_as_it_is() -> None:
    logits = np.random.default_rng(0).normal(size=40).astype(np.float32)
    allowed = np.random.default_rng(1).random(40) < 0.5
    mask = np.packbits(np.pad(allowed, (0, 24)), bitorder="little")
    out = process(logits, SamplingParams(), RowContext([], 0, mask=lambda: mask), np.empty(64, np.float32))
    assert np.array_equal(out, np.where(allowed, logits, -np.inf))


@pytest.mark.parity("F279")
def test_a_token_that_stands_several_times_is_penalised_once() -> None:
    assert processed(row(4, -2, 3), [0, 1, 0, 0, 1], repetition_penalty=2.0) == [2.0, -4.0, 3.0]


def test_presence_and_frequency_count_only_what_the_turn_generated() -> None:
    out = processed(row(4, 4, 4, 4), [0, 0, 1, 2, 2], generated=3, presence_penalty=0.5, frequency_penalty=0.25)
    assert out == [4.0, 4 - 0.75, 4 - 1.0, 4.0]


def test_bias_is_added() -> None:
    assert processed(row(1, 2, 3), [], logit_bias=((0, 5.0), (2, -100.0))) == [6.0, 2.0, -97.0]


def test_bias_comes_before_penalties_and_bans() -> None:
    bias = ((0, 5.0), (1, -3.0), (2, 9.0))
    assert processed(row(1, 1, 1), [0, 1], repetition_penalty=2.0, logit_bias=bias) == [3.0, -4.0, 10.0]
    assert processed(row(1, 1, 1), [0, 1], banned={2}, repetition_penalty=0.5, logit_bias=bias) == [
        12.0,
        -1.0,
        -math.inf,
    ]


def test_the_repetition_penalty_comes_before_those_of_the_output() -> None:
    out = processed(row(4, -2, 3), [0, 1], generated=2, repetition_penalty=2.0, presence_penalty=1.0)
    assert out == [4 / 2 - 1, -2 * 2 - 1, 3.0]


@pytest.mark.parity("F280", scenario="LP-02")
def test_a_token_that_would_repeat_an_n_gram_is_banned_and_no_other() -> None:
    out = processed(row(1, 1, 1, 1, 1), [1, 2, 3, 4, 1, 2], no_repeat_ngram_size=3)
    assert out == [1, 1, 1, -math.inf, 1]


@pytest.mark.parity("F280")
@given(
    tokens=st.lists(st.integers(0, 3), max_size=14),
    size=st.integers(1, 5),
)
def test_what_repeats_an_n_gram_is_found_as_by_listing_all_of_them(tokens: list[int], size: int) -> None:
    runs = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    tail = tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
    banned = [(*tail, token) in runs for token in range(4)]
    out = processed(row(0, 0, 0, 0), tokens, no_repeat_ngram_size=size)
    assert [value == -math.inf for value in out] == banned


@pytest.mark.parity("F277")
def test_the_grammar_comes_first_then_bias_penalties_minimum_and_n_grams() -> None:
    """Token 0 is penalised after its bias, 1 is masked, 2 ends the turn too early, 3 would repeat a pair, and a bias
    does not bring back what is banned."""
    params = SamplingParams(
        repetition_penalty=2.0, logit_bias=((0, 3.0), (1, 50.0), (2, 50.0), (3, 50.0)), no_repeat_ngram_size=2
    )
    mask = np.array([0b11101, 0, 0, 0], np.uint8)
    context = RowContext([4, 3, 0, 4], 0, frozenset({2}), lambda: mask)
    out = process(row(1, 1, 1, 1, -2), params, context, np.empty(32, np.float32))
    assert out.tolist() == [2.0, -math.inf, -math.inf, -math.inf, -4.0]


@pytest.mark.parity("F281")
def test_rows_are_changed_by_their_own_rules_and_the_caller_s_logits_stay() -> None:
    logits = np.stack([row(4, 3, 1), row(4, 3, 1), row(4, 3, 1)])
    before = logits.copy()
    rows = [
        SampleRow(SamplingParams(), 5),
        SampleRow(SamplingParams(), 5, RowContext([], 0, frozenset({0}))),
        SampleRow(SamplingParams(logit_bias=((2, 9.0),)), 5, RowContext([], 0)),
    ]
    assert BatchedSampler().sample(logits, rows) == [0, 1, 2]
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("top_k", [0, 40])
def test_min_p_keeps_the_likely_ones_alone(top_k: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(500).astype(np.float32) * 2
    weights = np.exp((logits - logits.max()) / 0.7)
    allowed = set(np.flatnonzero(weights >= 0.2).tolist())
    sampler = BatchedSampler()
    seen = {
        sampler.sample(logits[None], [SampleRow(SamplingParams(0.7, top_k, seed=seed, min_p=0.2), 9)])[0]
        for seed in range(400)
    }
    assert seen == allowed


def test_min_p_1_is_greedy() -> None:
    logits = row(1, 7, 3, 6.9)
    for seed in range(20):
        params = SamplingParams(2.0, seed=seed, min_p=1.0)
        assert BatchedSampler().sample(logits[None], [SampleRow(params, 1)]) == [1]


def test_logprobs_are_those_of_the_softmax_with_ties_in_order_of_id() -> None:
    logits = row(1.0, 3.0, 3.0, 2.0, -5.0)
    expected = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    found = logprob_of(logits, 3, 3)
    assert found.token == 3
    assert found.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2, 3]
    assert [value for _, value in found.top] == pytest.approx(expected[[1, 2, 3]].tolist(), abs=1e-6)
    assert logprob_of(logits, 4, 0).top == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("no_repeat_ngram_size", -1),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parity("F282", scenario="TP-04")
def test_a_minimum_above_the_maximum_is_refused() -> None:
    TurnOptions(max_generated_tokens=5, min_generated_tokens=5)
    with pytest.raises(InvalidOption, match="min_generated_tokens"):
        TurnOptions(max_generated_tokens=4, min_generated_tokens=5)
