"""The engine on the demo model: equal to transformers, and the same bit for bit whatever surrounds a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine_actor.core.engine import Engine
from engine_actor.decoding.decoder import PackedStep
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.errors import RetryableStepError
from engine_actor.options import SamplingParams, TurnOptions
from engine_actor.requests.events import EventFlags
from engine_actor.requests.request import Request
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.doubles import run_out
from tests.support.engine_view import sharing_weights
from tests.support.engines import engine_of
from tests.support.prose import PROSE

NEW = 64
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea, and another one about a ship that leaves its harbour before sunrise.",
    "Count from one to ten.",
    PROSE[:400] + " Summarise this text.",
    "Hello!",
    "Why is the sky blue? Explain it to a child of seven years, in a few short sentences.",
    PROSE[300:900] + " What is this text about?",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(template.format(text), special_tokens=False) for text in QUESTIONS]


@pytest.fixture(scope="module", params=["auto", "expanded"])
def model(request: pytest.FixtureRequest, smollm2_path: Path) -> TorchDecoder:
    return TorchDecoder.load(smollm2_path, dtype="bfloat16", device="cpu", weights=request.param)


@pytest.fixture(scope="module", params=["auto", "expanded"])
def wide_model(request: pytest.FixtureRequest, smollm2_path: Path) -> TorchDecoder:
    return TorchDecoder.load(smollm2_path, dtype="float32", device="cpu", weights=request.param)


@dataclass
class Harness:
    """Runs turns to their end and checks the engine after every step."""

    engine: Engine
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def begin(self, prompt: list[int], new: int = NEW, sampling: SamplingParams | None = None) -> Request:
        request = self.engine.create_request()
        options = TurnOptions(new, sampling or SamplingParams(), ignore_eos=True)
        request.begin_turn(prompt, options)
        return request

    def run(self) -> None:
        while self.engine.has_pending_requests():
            for event in self.engine.run(256):
                if event.token is not None:
                    assert event.record is not None
                    self.tokens.setdefault(event.record.id, []).append(event.token)
                if event.flags & EventFlags.TURN_FINISHED and event.request is not None:
                    event.request.close()
            self.engine.check_integrity()

    def answers(
        self, prompts: list[list[int]], new: int = NEW, sampling: SamplingParams | None = None
    ) -> list[list[int]]:
        requests = [self.begin(prompt, new, sampling) for prompt in prompts]
        self.run()
        return [self.tokens[request.id] for request in requests]


def harness(model: TorchDecoder, **config: int | bool) -> Harness:
    """A new engine over the same weights, with pools of its own."""
    decoder = sharing_weights(model)
    settings: dict[str, int | bool] = {"num_blocks": 160, "block_size": 16, "max_batch_size": 16, **config}
    return Harness(engine_of(decoder, **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def together(model: TorchDecoder, prompts: list[list[int]]) -> list[list[int]]:
    return harness(model).answers(prompts)


def test_float32_tokens_are_those_of_transformers(
    wide_model: TorchDecoder, prompts: list[list[int]], smollm2_path: Path
) -> None:
    """Greedy `generate` picks the largest logit at each place. So our answer is equal to it, token for token, if every
    token of ours is the largest of transformers' logits after the prompt and our tokens before it."""
    together = harness(wide_model).answers(prompts)
    solo = harness(wide_model)
    assert [solo.answers([prompt])[0] for prompt in prompts[:2]] == together[:2]
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for prompt, answer in zip(prompts, together, strict=True):
            logits = reference(torch.tensor([prompt + answer]), use_cache=False).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        # And once by `generate` itself.
        ids = torch.tensor([prompts[0]])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert out[0, len(prompts[0]) :].tolist() == together[0][:6]


def test_a_token_is_the_same_alone(model: TorchDecoder, prompts: list[list[int]], together: list[list[int]]) -> None:
    solo = harness(model)
    for prompt, answer in zip(prompts, together, strict=True):
        assert solo.answers([prompt]) == [answer]


@pytest.mark.parametrize(("chunk", "block"), [(1, 16), (7, 4), (16, 32), (512, 16)], ids=lambda value: str(value))
def test_a_token_is_the_same_for_any_chunk_and_block_size(
    model: TorchDecoder, prompts: list[list[int]], together: list[list[int]], chunk: int, block: int
) -> None:
    changed = harness(model, chunk_size=chunk, block_size=block, num_blocks=2560 // block)
    assert changed.answers(prompts, 24) == [answer[:24] for answer in together]


def test_a_token_is_the_same_on_a_hit(model: TorchDecoder, prompts: list[list[int]], together: list[list[int]]) -> None:
    warm = harness(model)
    warm.answers(prompts, 2)
    computed = warm.engine.metrics.prefill_tokens
    assert warm.answers(prompts, 24) == [answer[:24] for answer in together]
    again = warm.engine.metrics.prefill_tokens - computed
    assert again <= 16 * len(prompts), "all but the last partial block comes from the index"


def test_sixteen_requests_in_a_pool_for_five_equal_their_solo_runs(
    model: TorchDecoder, prompts: list[list[int]]
) -> None:
    many = [prompt[-40:] + prompt[-5 - i :] for i, prompt in enumerate(prompts + prompts)]
    expected = harness(model, prefix_reuse=False).answers(many, 40)
    tight = harness(model, num_blocks=5 * 6)
    assert tight.answers(many, 40) == expected
    assert tight.engine.metrics.preemptions > 0


def test_a_step_that_fails_once_is_rolled_back_and_gives_the_same_tokens(
    model: TorchDecoder, prompts: list[list[int]], together: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wounded = harness(model)
    forward, calls = TorchDecoder.forward, 0

    def fail_at_times(decoder: TorchDecoder, step: PackedStep) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = forward(decoder, step)
        if calls in (1, 5, 6):
            raise RetryableStepError("injected after the writes")
        return logits

    monkeypatch.setattr(TorchDecoder, "forward", fail_at_times)
    assert wounded.answers(prompts, 12) == [answer[:12] for answer in together]
    assert wounded.engine.metrics.rollbacks == 3


def test_seeded_sampling_is_the_same_alone_and_together(model: TorchDecoder, prompts: list[list[int]]) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=1234)
    batch = harness(model).answers(prompts, 16, sampling)
    solo = harness(model)
    assert [solo.answers([prompt], 16, sampling)[0] for prompt in prompts] == batch
    other = harness(model).answers(prompts, 16, SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=1235))
    assert other != batch


def test_a_conversation_that_moved_with_its_cache_says_the_same(model: TorchDecoder, prompts: list[list[int]]) -> None:
    old = harness(model).engine
    request = old.create_request()
    request.begin_turn(prompts[0], TurnOptions(20, ignore_eos=True))
    run_out(old)
    tokens, kv = request.tokens, old.read_cache(request, 2**30)
    assert kv is not None and kv.positions == len(prompts[0]) + 19
    request.begin_turn(prompts[1], TurnOptions(20, ignore_eos=True))
    run_out(old)
    # Only now, since an engine takes the weights over with its pools.
    new = harness(model)
    new.answers(prompts[1:3], 4)
    restored = new.engine.restore_request(tokens, kv)
    assert restored is not None
    restored.begin_turn(prompts[1], TurnOptions(20, ignore_eos=True))
    run_out(new.engine)
    assert restored.tokens == request.tokens and len(restored.tokens) == len(prompts[0]) + len(prompts[1]) + 40
    assert restored.usage == request.usage and request.usage.cached_tokens == kv.positions


def test_a_shared_system_prompt_is_computed_once(model: TorchDecoder, tokenizer: Tokenizer) -> None:
    system = tokenizer.encode(PROSE, special_tokens=False)[:500]
    assert len(system) == 500
    shared = harness(model)
    first = shared.answers([[*system, 11, 12, 13]], 8)
    before = shared.engine.metrics.prefill_tokens
    second = shared.answers([[*system, 21, 22, 23]], 8)
    computed = shared.engine.metrics.prefill_tokens - before
    assert computed == 503 - 31 * 16
    cold = harness(model, prefix_reuse=False)
    assert cold.answers([[*system, 11, 12, 13], [*system, 21, 22, 23]], 8) == [*first, *second]
