"""The choice of a token, against a full sort in double precision, and its independence of everything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.errors import InvalidOption
from engine_actor.options import SamplingParams
from engine_actor.sampling.batched_sampler import BatchedSampler
from engine_actor.sampling.philox import uniforms
from engine_actor.sampling.sample_row import SampleRow


def sample_one(logits: np.ndarray, params: SamplingParams, position: int = 0) -> int | None:
    [token] = BatchedSampler().sample(logits[None].astype(np.float32), [SampleRow(params, position)])
    return token


def reference(logits: np.ndarray, params: SamplingParams, position: int) -> set[int]:
    """All tokens that the rule allows; more than one where u falls on a border within rounding."""
    logits = logits.astype(np.float32)
    if params.greedy:
        return {int(np.flatnonzero(logits == logits.max())[0])}
    order = np.lexsort((np.arange(len(logits)), -logits))
    if params.top_k:
        order = order[: params.top_k]
    scaled = (logits[order] - logits.max()) / np.float32(params.temperature)
    weights = np.exp(scaled.astype(np.float32)).astype(np.float64)
    if params.top_p < 1.0:
        cumulative = weights.cumsum() / weights.sum()
        kept = int(np.searchsorted(cumulative, params.top_p * (1 - 1e-12), side="left")) + 1
        also = int(np.searchsorted(cumulative, params.top_p * (1 + 1e-12), side="left")) + 1
    else:
        kept = also = len(weights)
    [u] = uniforms([params.seed], [position])
    allowed = set()
    for count in {min(kept, len(weights)), min(also, len(weights))}:
        cumulative = weights[:count].cumsum()
        for slack in (1 - 1e-9, 1.0, 1 + 1e-9):
            at = int(np.searchsorted(cumulative, u * slack * cumulative[-1], side="right"))
            allowed.add(int(order[min(at, count - 1)]))
    return allowed


def random_logits(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    logits = rng.standard_normal(vocab) * rng.choice([0.01, 1.0, 5.0, 60.0])
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    elif kind == "masked":
        logits[rng.random(vocab) < 0.7] = -np.inf
        logits[rng.integers(vocab)] = 0.0
    elif kind == "signed_zero":
        logits = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    elif kind == "huge":
        logits = rng.choice([-3e38, 3e38, 0.0], vocab)
    return np.asarray(logits, np.float32)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([5, 6, 33, 257, 1000, 5000]),
    kind=st.sampled_from(["plain", "ties", "masked", "signed_zero", "huge"]),
    temperature=st.sampled_from([1e-4, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 2, 3, 50, 999, 10**6]),
    top_p=st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99999, 1.0]),
)
def test_equals_a_full_sort(seed: int, vocab: int, kind: str, temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(np.random.default_rng(seed), vocab, kind)
    params = SamplingParams(temperature, top_k, top_p, seed)
    with np.errstate(over="ignore"):
        for position in range(3):
            assert sample_one(logits, params, position) in reference(logits, params, position)


@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_equals_a_full_sort_over_a_real_vocabulary(top_k: int, top_p: float, spread: float) -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((8, 50_000)) * spread).astype(np.float32)
    params = SamplingParams(1.0, top_k, top_p, 21)
    tokens = BatchedSampler().sample(logits, [SampleRow(params, i) for i in range(8)])
    for i, token in enumerate(tokens):
        assert token in reference(logits[i], params, i)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sample_one(np.array([1.0, 3.0, 0.0, 3.0, 3.0]), SamplingParams()) == 1


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_of_equal_peaks_top_p_zero_keeps_the_lowest_id(top_p: float) -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0])
    assert {sample_one(logits, SamplingParams(1.0, 0, top_p), p) for p in range(30)} == {1}


def test_of_ties_at_the_border_top_k_keeps_the_lowest_ids() -> None:
    logits = np.array([2.0, 5.0, 2.0, 2.0, 2.0])
    assert {sample_one(logits, SamplingParams(50.0, 3), p) for p in range(200)} == {0, 1, 2}


def test_top_p_is_taken_over_what_top_k_left() -> None:
    # Over the whole vocabulary the peak has 1/3 and top_p .6 would keep two; of the two that top_k leaves it has 2/3.
    logits = np.log(np.array([4.0, 2.0, 2.0, 2.0, 2.0]))
    assert {sample_one(logits, SamplingParams(1.0, 2, 0.6), p) for p in range(50)} == {0}
    assert {sample_one(logits, SamplingParams(1.0, 0, 0.6), p) for p in range(200)} == {0, 1, 2}


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4)])
def test_a_share_that_is_reached_exactly_is_enough(top_k: int, top_p: float, kept: int) -> None:
    # Four of equal weight: every border lies exactly between two of them, with and without top_k.
    logits = np.array([-np.inf, 2.0, 2.0, -np.inf, 2.0, 2.0])
    drawn = {sample_one(logits, SamplingParams(1.0, top_k, top_p), p) for p in range(200)}
    assert drawn == set([1, 2, 4, 5][:kept])


@pytest.mark.parity("F256", scenario="SA-10")
@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0.0, top_k=40, top_p=0.9), True),
        (SamplingParams(temperature=1.0, top_k=1), True),
        (SamplingParams(temperature=9e-6), True),
        (SamplingParams(temperature=1.0, top_k=5), False),
        (SamplingParams(temperature=1.0, top_p=0.9), False),
        (SamplingParams(temperature=1.0), False),
    ],
)
def test_spellings_of_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy
    drawn = {sample_one(np.zeros(8), params, p) for p in range(100)}
    assert (drawn == {0}) is greedy


def test_rows_with_different_parameters_in_one_batch() -> None:
    logits = np.array([[0, 5, 1, 2, 3], [0, 1, 6, 2, 3], [0, 1, 2, 7, 3]], np.float32)
    params = [SamplingParams(1.0, 1, 0.0, 10), SamplingParams(0.7, 2, 0.01, 11), SamplingParams(1.3, 0, 0.01, 12)]
    assert BatchedSampler().sample(logits, [SampleRow(p, 3) for p in params]) == [1, 2, 3]


@pytest.mark.parity("F265", "F276")
def test_a_choice_is_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((24, 3001)) * 2).astype(np.float32)
    rows = [
        SampleRow(
            SamplingParams(float(rng.choice([0.0, 0.5, 1.0, 2.0])), int(rng.choice([0, 1, 7, 400])), 0.9, i * 977),
            i * 13,
        )
        for i in range(24)
    ]
    alone = [BatchedSampler().sample(logits[i : i + 1], [rows[i]])[0] for i in range(24)]
    assert len(set(alone)) > 3
    sampler = BatchedSampler()
    for _ in range(10):
        members = rng.permutation(24)[: rng.integers(1, 25)]
        assert sampler.sample(logits[members], [rows[i] for i in members]) == [alone[i] for i in members]


@pytest.mark.parity("F273", scenario="SA-04")
def test_drawing_again_gives_the_same_tokens() -> None:
    """A checkpoint is nothing but the position."""
    logits = np.tile(np.array([0, 0, 3, 3, 3, 0], np.float32), (2, 1))
    rows = [[SampleRow(SamplingParams(1.0, 3, 1.0, seed), p) for seed in (1234, 5678)] for p in range(20)]
    sampler = BatchedSampler()
    first = [sampler.sample(logits, row) for row in rows]
    assert [sampler.sample(logits, row) for row in rows] == first
    assert {token for pair in first for token in pair} == {2, 3, 4}
    assert [pair[0] for pair in first] != [pair[1] for pair in first]


def test_equal_rows_of_different_seeds_differ_and_keep_their_own_stream() -> None:
    logits = np.zeros((20, 64), np.float32)
    params = [SamplingParams(1.0, 0, 1.0, 1000 + 7 * i) for i in range(20)]
    for step in range(4):
        together = BatchedSampler().sample(logits, [SampleRow(p, step) for p in params])
        apart = [sample_one(np.zeros(64), p, step) for p in params]
        assert together == apart and len(set(together)) > 1


@pytest.mark.parametrize("broken", ["nan", "inf", "masked", "nan_late"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, 5, 0.9)])
def test_a_row_without_usable_numbers_fails_alone(broken: str, params: SamplingParams) -> None:
    logits = np.tile(np.array([0, 1, 9, 2, 0, 0, 0, 0], np.float32), (3, 1))
    if broken == "nan":
        logits[1] = np.nan
    elif broken == "nan_late":
        logits[1, 7] = np.nan
    elif broken == "inf":
        logits[1, 3] = np.inf
    else:
        logits[1] = -np.inf
    tokens = BatchedSampler().sample(logits, [SampleRow(params, 0)] * 3)
    assert tokens == [2, None, 2]


def test_a_batch_with_more_rows_than_parameters_is_refused() -> None:
    with pytest.raises(AssertionError, match="3 rows of logits for 2"):
        BatchedSampler().sample(np.zeros((3, 4), np.float32), [SampleRow(SamplingParams(), 0)] * 2)


def test_logits_are_not_changed() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    before = logits.copy()
    BatchedSampler().sample(logits, [SampleRow(SamplingParams(0.5, 0, 0.9, 1), 1)] * 2)
    assert np.array_equal(logits, before)


def test_equal_logits_use_their_whole_nucleus() -> None:
    """Of 500 equal tokens top_p .95 leaves the first 475, and 5000 draws reach nearly all of them."""
    rows = [SampleRow(SamplingParams(1.0, 0, 0.95, 17), p) for p in range(5000)]
    tokens = {t for r in rows for t in BatchedSampler().sample(np.zeros((1, 500), np.float32), [r])}
    assert len(tokens) > 425
    assert max(t for t in tokens if t is not None) < 475


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0, seed=3), SamplingParams(0.7, 6, 1.0, 3), SamplingParams(1.5, 0, 0.8, 3)]
)
def test_frequencies_follow_the_probabilities(params: SamplingParams) -> None:
    draws, vocab = 20_000, 12
    logits = np.random.default_rng(5).standard_normal(vocab).astype(np.float32)
    batch = np.tile(logits, (draws, 1))
    tokens = BatchedSampler().sample(batch, [SampleRow(params, p) for p in range(draws)])
    order = np.argsort(-logits, kind="stable")[: params.top_k or vocab]
    weights = np.exp(logits[order].astype(np.float64) / params.temperature)
    weights /= weights.sum()
    kept = int(np.searchsorted(weights.cumsum(), params.top_p)) + 1
    weights = weights[:kept] / weights[:kept].sum()
    counts = np.bincount([t for t in tokens if t is not None], minlength=vocab)[order[:kept]]
    assert counts.sum() == draws
    chi_square = ((counts - draws * weights) ** 2 / (draws * weights)).sum()
    freedom = len(weights) - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parity("F257")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.1),
        ("top_p", -1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_impossible_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
