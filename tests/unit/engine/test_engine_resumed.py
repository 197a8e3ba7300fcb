"""The demo model goes on with an answer that another engine began: bit for bit the one that it would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_actor.core.engine import Engine
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import InvalidOption
from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.requests.request import Request
from serve_app.text.tokenizer import load_tokenizer
from tests.support.engine_view import sharing_weights
from tests.support.engines import engine_of

NEW = 24
QUESTION = "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n"
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> TorchDecoder:
    return TorchDecoder.load(smollm2_path, dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def prompt(smollm2_path: Path) -> list[int]:
    return load_tokenizer(smollm2_path).encode(QUESTION, special_tokens=False)


def begin(engine: Engine, prompt: list[int], sampling: SamplingParams, generated: list[int]) -> Request:
    request = engine.create_request()
    options = TurnOptions(NEW, sampling, ignore_eos=True, resumed_tokens=len(generated))
    request.begin_turn(prompt + generated, options)
    return request


def run(engine: Engine) -> None:
    while engine.has_pending_requests():
        engine.run(256)
    engine.check_integrity()


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=5, **PENALTIES)],
    ids=["greedy", "seeded-penalties"],
)
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(
    model: TorchDecoder, prompt: list[int], sampling: SamplingParams
) -> None:
    def engine() -> Engine:
        decoder = sharing_weights(model)
        return engine_of(decoder, num_blocks=200, block_size=16, max_batch_size=NEW, prefix_reuse=False)

    first = engine()
    whole = begin(first, prompt, sampling, [])
    run(first)
    answer = whole.tokens[len(prompt) :]
    assert len(answer) == NEW
    other = engine()
    resumed = [begin(other, prompt, sampling, answer[:cut]) for cut in range(NEW)]
    run(other)
    assert [request.tokens for request in resumed] == [whole.tokens] * NEW
    assert {(r.finish_reason, r.usage.generated_tokens) for r in resumed} == {(whole.finish_reason, NEW)}


def test_what_cannot_have_been_generated_is_refused(model: TorchDecoder, prompt: list[int]) -> None:
    engine = engine_of(sharing_weights(model), num_blocks=20, block_size=16)
    with pytest.raises(InvalidOption, match="resumed_tokens"):
        TurnOptions(NEW, resumed_tokens=NEW)
    with pytest.raises(InvalidOption, match="resumed_tokens"):
        engine.create_request().begin_turn(prompt, TurnOptions(resumed_tokens=len(prompt)))
