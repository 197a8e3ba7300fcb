"""Answers that follow a grammar, by the engine on the demo model: the same bit for bit whatever surrounds them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_actor.decoding.decoder import PackedStep
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import RetryableStepError
from engine_actor.options import GrammarSpec, SamplingParams, TurnOptions
from engine_actor.requests.record import FinishReason
from engine_actor.requests.request import Request
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.doubles import run_out
from tests.support.engine_view import sharing_weights
from tests.support.engines import engine_of
from tests.support.grammars import lark, regex, schema
from tests.support.prose import PROSE

GREEDY = SamplingParams()
HOT = SamplingParams(temperature=1.2, top_p=0.95, seed=11, presence_penalty=0.3)
PERSON = schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
WORDS = regex("[A-Z][a-z]{2,6}( [a-z]{2,6}){2,4}\\.")
CHOICE = lark('start: "yes, " WORD | "no, " WORD\nWORD: /[a-z]{3,9}/')


@dataclass(frozen=True)
class Asked:
    text: str
    grammar: GrammarSpec | None = None
    sampling: SamplingParams = GREEDY
    new: int = 24


ASKED = [
    Asked("Describe a person as JSON.", PERSON),
    Asked("Name three colours."),
    Asked("Describe another person as JSON.", PERSON, HOT),
    Asked("Write one sentence about the sea.", WORDS),
    Asked(PROSE[:300] + " Is it so?", CHOICE, HOT),
    Asked("Count from one to ten.", sampling=HOT),
    Asked(PROSE[:300] + " Is it not?", CHOICE),
]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> TorchDecoder:
    return TorchDecoder.load(smollm2_path, dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


class Bench:
    """An engine of its own over the shared weights."""

    def __init__(self, model: TorchDecoder, tokenizer: Tokenizer, **config: int | bool) -> None:
        decoder = sharing_weights(model)
        settings: dict[str, int | bool] = {"num_blocks": 160, "block_size": 16, "max_batch_size": 32, **config}
        self.engine = engine_of(decoder, vocabulary=tokenizer.vocabulary, **settings)
        self._tokenizer = tokenizer

    def prompt(self, asked: Asked) -> list[int]:
        text = f"<|im_start|>user\n{asked.text}<|im_end|>\n<|im_start|>assistant\n"
        return self._tokenizer.encode(text, special_tokens=False)

    def begin(self, asked: Asked, said: list[int] | None = None) -> Request:
        """`said`: what another engine had generated of it."""
        request, said = self.engine.create_request(), said or []
        options = TurnOptions(asked.new, asked.sampling, grammar=asked.grammar, resumed_tokens=len(said))
        request.begin_turn(self.prompt(asked) + said, options)
        return request

    def answers(self, several: list[Asked]) -> list[list[int]]:
        requests = [self.begin(asked) for asked in several]
        run_out(self.engine)
        self.engine.check_integrity()
        said = [r.tokens[len(self.prompt(asked)) :] for r, asked in zip(requests, several, strict=True)]
        for request in requests:
            request.close()
        return said


@pytest.fixture(scope="module")
def together(model: TorchDecoder, tokenizer: Tokenizer) -> list[list[int]]:
    return Bench(model, tokenizer).answers(ASKED)


def test_they_follow_their_grammars(together: list[list[int]], tokenizer: Tokenizer) -> None:
    for asked, said in zip(ASKED, together, strict=True):
        text = tokenizer.decode(said)
        if asked.grammar is PERSON and len(said) < asked.new:
            assert set(json.loads(text)) == {"name", "age"}
        elif asked.grammar is CHOICE:
            assert re.fullmatch("(yes|no), [a-z]{3,9}", text)
        elif asked.grammar is WORDS and len(said) < asked.new:
            assert re.fullmatch(WORDS.data, text)


def test_a_token_is_the_same_alone(model: TorchDecoder, tokenizer: Tokenizer, together: list[list[int]]) -> None:
    """So are those of rows without a grammar beside others that have one."""
    solo = Bench(model, tokenizer)
    assert [solo.answers([asked])[0] for asked in ASKED] == together


@pytest.mark.parametrize(("chunk", "block"), [(1, 16), (7, 4), (16, 32)], ids=str)
def test_a_token_is_the_same_for_any_chunk_and_block_size(
    model: TorchDecoder, tokenizer: Tokenizer, together: list[list[int]], chunk: int, block: int
) -> None:
    changed = Bench(model, tokenizer, chunk_size=chunk, block_size=block, num_blocks=2560 // block)
    assert changed.answers(ASKED) == together


def test_a_token_is_the_same_on_a_hit(model: TorchDecoder, tokenizer: Tokenizer, together: list[list[int]]) -> None:
    warm = Bench(model, tokenizer)
    assert warm.answers(ASKED) == together
    computed = warm.engine.metrics.prefill_tokens
    assert warm.answers(ASKED) == together
    assert warm.engine.metrics.prefill_tokens - computed <= 16 * len(ASKED)


def test_a_token_is_the_same_where_requests_are_preempted(
    model: TorchDecoder, tokenizer: Tokenizer, together: list[list[int]]
) -> None:
    tight = Bench(model, tokenizer, num_blocks=27, block_size=4, prefix_reuse=False)
    requests = [tight.begin(asked) for asked in ASKED]
    said: dict[int, list[int]] = {}
    while len(said) < len(requests):
        tight.engine.run(256)
        for i, request in enumerate(requests):
            if i not in said and request.finish_reason is not None:
                said[i] = request.tokens[len(tight.prompt(ASKED[i])) :]
                request.close()
    assert [said[i] for i in range(len(ASKED))] == together
    assert tight.engine.metrics.preemptions > 0


def test_a_step_that_fails_once_is_rolled_back_and_gives_the_same_tokens(
    model: TorchDecoder, tokenizer: Tokenizer, together: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wounded = Bench(model, tokenizer)
    forward, calls = TorchDecoder.forward, 0

    def fail_at_times(decoder: TorchDecoder, step: PackedStep) -> object:
        nonlocal calls
        calls += 1
        logits = forward(decoder, step)
        if calls in (1, 5, 6, 11):
            raise RetryableStepError("injected after the writes")
        return logits

    monkeypatch.setattr(TorchDecoder, "forward", fail_at_times)
    assert wounded.answers(ASKED) == together
    assert wounded.engine.metrics.rollbacks == 4


@pytest.mark.parametrize("which", [0, 2, 4], ids=["greedy", "sampled", "lark"])
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(
    model: TorchDecoder, tokenizer: Tokenizer, together: list[list[int]], which: int
) -> None:
    asked, whole = ASKED[which], together[which]
    other = Bench(model, tokenizer, num_blocks=400, prefix_reuse=False)
    resumed = [other.begin(asked, whole[:cut]) for cut in range(len(whole))]
    run_out(other.engine)
    for request in resumed:
        assert request.tokens == other.prompt(asked) + whole
        assert request.usage.generated_tokens == len(whole)
        ended = FinishReason.MAX_GENERATED_TOKENS if len(whole) == asked.new else FinishReason.EOS
        assert request.finish_reason is ended


def test_a_second_turn_follows_its_own_grammar_from_its_beginning(model: TorchDecoder, tokenizer: Tokenizer) -> None:
    bench = Bench(model, tokenizer)
    request = bench.begin(Asked("Is it so?", CHOICE))
    run_out(bench.engine)
    for spec in (regex("[0-9]{3}"), None, CHOICE):
        history, prompt = request.tokens, bench.prompt(ASKED[0])
        fresh, begun = bench.engine.create_request(), len(history) + len(prompt)
        for turn, given in ((request, prompt), (fresh, history + prompt)):
            turn.begin_turn(given, TurnOptions(8, grammar=spec))
            run_out(bench.engine)
        assert request.tokens == fresh.tokens
        if spec is not None:
            pattern = "[0-9]{3}" if spec is not CHOICE else "(yes|no), [a-z]{1,9}.*"
            assert re.fullmatch(pattern, tokenizer.decode(request.tokens[begun:]))
