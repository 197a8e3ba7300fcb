"""The seven scenarios, 628 tokens, by which the third source document holds two builds of a sampler to each other.

The digests were recorded before the sampler moved behind the decoder. Each scenario also shows which way its tokens
were chosen, so that none can pass by taking another one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.requests.record import FinishReason
from engine_actor.sampling import batched_sampler
from tests.support.doubles import SyntheticDecoder, build_engine, run_out, tokens_of

VOCAB, EOS = 64, 36
GREEDY = SamplingParams()
WARM, NARROW = SamplingParams(0.8, top_p=0.9, seed=5), SamplingParams(1.2, top_k=12, seed=6)


class ScatteredDecoder(SyntheticDecoder):
    """Logits in steps of 1/64 between 0 and 8, by a hash of the whole sequence: the same on every machine."""

    def row_logits(self, sequence: list[int]) -> np.ndarray:
        state = 7
        for token in sequence:
            state = (state * 31 + token + 1) % 10007
        ids = np.arange(VOCAB, dtype=np.int64)
        return ((ids * ids * 37 + ids * state + state * state) % 509 / 64).astype(np.float32)


def turn(tokens: int, sampling: SamplingParams = GREEDY, **options: Any) -> TurnOptions:
    return TurnOptions(tokens, sampling, **{"ignore_eos": True, **options})


REPEATED = SamplingParams(repetition_penalty=1.2)
# Turns that run at once, then how many rows were taken as they are, changed first, and drawn.
SCENARIOS: dict[str, tuple[list[TurnOptions], tuple[int, int, int], str]] = {
    "uniform greedy": ([turn(16)] * 8, (128, 0, 0), "2a229b7efd807592"),
    "repetition penalty": ([turn(20, REPEATED)] * 4, (0, 80, 0), "b93e84ed82dea0fb"),
    "minimum length": ([turn(20, min_generated_tokens=20, ignore_eos=False)] * 4, (0, 80, 0), "a1edd02fbcf31c5a"),
    "staggered lengths": ([turn(2 * i + 2) for i in range(8)], (72, 0, 0), "256325269c550b66"),
    "greedy beside two sampling configurations": (
        [turn(16, p) for p in (GREEDY, WARM, NARROW) * 2],
        (32, 0, 64),
        "0798ec6cc9516f42",
    ),
    "pinned seed": ([turn(16, SamplingParams(1.0, seed=1234))] * 4, (0, 0, 64), "245c80740b78924b"),
}
SOLO = "15982306e8032d8d"


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def count(name: str, label: str) -> None:
        function: Callable[..., Any] = getattr(batched_sampler, name)

        def counting(*args: Any) -> Any:
            calls[label] += 1
            return function(*args)

        monkeypatch.setattr(batched_sampler, name, counting)

    count("process", "changed")
    count("_draw", "drawn")
    return calls


def answers(turns: list[TurnOptions]) -> list[list[int]]:
    engine = build_engine(ScatteredDecoder(VOCAB, EOS))
    requests = [engine.create_request() for _ in turns]
    for i, (request, options) in enumerate(zip(requests, turns, strict=True)):
        request.begin_turn([5 + i, 9, 13], options)
    events = run_out(engine)
    return [tokens_of(events, request) for request in requests]


def digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


@pytest.mark.parity("F276")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_the_recorded_tokens_by_the_expected_way(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    turns, (taken, changed, drawn), recorded = SCENARIOS[name]
    calls = counted(monkeypatch)
    tokens = answers(turns)
    assert digest(tokens) == recorded
    assert (calls["changed"], calls["drawn"]) == (changed, drawn)
    assert sum(map(len, tokens)) == taken + changed + drawn


@pytest.mark.parity("F276")
def test_four_solo_turns_have_the_recorded_tokens_and_all_scenarios_are_628() -> None:
    solo = [answers([turn(27, sampling)])[0] for sampling in (GREEDY, WARM, NARROW, REPEATED)]
    assert digest(solo) == SOLO
    assert sum(map(len, solo)) + sum(sum(paths) for _, paths, _ in SCENARIOS.values()) == 628


class PulledDecoder(SyntheticDecoder):
    """Whatever came: token 7 is likeliest, then 42."""

    def row_logits(self, sequence: list[int]) -> np.ndarray:
        logits = np.full(VOCAB, 5.0, np.float32)
        logits[[7, 42]] = 10.0, 8.0
        return logits


@pytest.mark.parity("F280", "F281", scenario="LP-03")
def test_only_a_turn_that_asks_for_it_is_kept_from_repeating_an_n_gram() -> None:
    engine = build_engine(PulledDecoder(VOCAB, EOS))
    prompt, sizes = [5, 6, 7, 8, 5, 6], (0, 3)
    requests = [engine.create_request() for _ in sizes]
    for request, size in zip(requests, sizes, strict=True):
        request.begin_turn(prompt, turn(1, SamplingParams(no_repeat_ngram_size=size)))
    events = run_out(engine)
    assert [tokens_of(events, request) for request in requests] == [[7], [42]]


def test_where_every_token_is_banned_the_turn_ends_and_says_why() -> None:
    engine = build_engine(SyntheticDecoder(4, 3))
    request = engine.create_request()
    request.begin_turn([0, 1, 2, 3], turn(1, SamplingParams(no_repeat_ngram_size=1)))
    [event] = run_out(engine)
    assert event.finish_reason is FinishReason.FAILED
    assert event.message == "the model gave no finite number for any token that its options allow"


def test_the_minimum_length_is_one_that_matters() -> None:
    without = answers([turn(20, ignore_eos=False)] * 4)
    assert min(map(len, without)) < 20
