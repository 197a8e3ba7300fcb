"""What a request says reaches the engine, and what it does not say has its default."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.options import SamplingParams
from serve_app.text.prompts import PromptBuilder
from tests.http.http_harness import Server, StartServer
from tests.support.tokenizers import with_template


def sampling(server: Server, **fields: Any) -> SamplingParams:
    assert server.chat(**fields).status_code == 200
    return server.engine.requests[-1].sampling


def test_sampling_parameters_arrive(server: Server) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7}
    assert sampling(server, **given) == SamplingParams(temperature=0.5, top_p=0.9, top_k=40, seed=7)


def test_defaults_are_those_of_the_api(server: Server) -> None:
    params = sampling(server)
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


def test_defaults_can_be_the_models(start_server: StartServer) -> None:
    server = start_server(sampling={"temperature": 0.2, "top_p": 0.8, "top_k": 5})
    params = sampling(server)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.8, 5)
    assert sampling(server, temperature=0).temperature == 0.0


def test_null_is_absent(server: Server) -> None:
    names = ["temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "stream", "user", "n"]
    names += ["stream_options", "session_id", "ignore_eos", "tools", "logprobs", "response_format", "logit_bias"]
    params = sampling(server, **dict.fromkeys(names))
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


def test_penalties_and_biases_arrive(server: Server) -> None:
    given: dict[str, Any] = {"min_p": 0.1, "presence_penalty": -2, "frequency_penalty": 1.5, "repetition_penalty": 1.1}
    given["no_repeat_ngram_size"] = 3
    params = sampling(server, **given, logit_bias={"0": -100, "49151": 2.5}, seed=1, temperature=0)
    assert params == SamplingParams(seed=1, **given, logit_bias=((0, -100.0), (49151, 2.5)))
    assert server.respond(**given, store=False).status_code == 200
    assert server.engine.requests[-1].sampling.frequency_penalty == 1.5


def test_what_says_nothing_of_penalties_leaves_the_models_own(server: Server, start_server: StartServer) -> None:
    nothing = {"n": 1, "best_of": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "stop_token_ids": []}
    params = sampling(server, **nothing, presence_penalty=0, frequency_penalty=0.0, min_tokens=0, seed=1)
    assert params == SamplingParams(temperature=1.0, seed=1)
    request = server.engine.requests[-1]
    assert (request.choices, request.logprobs, request.min_generated_tokens) == (1, None, 0)
    own: dict[str, Any] = {"repetition_penalty": 1.05, "min_p": 0.05, "no_repeat_ngram_size": 4}
    penalising = start_server(sampling=own)
    assert sampling(penalising, seed=1) == SamplingParams(1.0, seed=1, **own)
    neutral = {"repetition_penalty": 1, "min_p": 0, "no_repeat_ngram_size": 0}
    assert sampling(penalising, seed=1, **neutral) == SamplingParams(1.0, seed=1)


def test_what_ends_a_turn_arrives(server: Server) -> None:
    assert server.chat(stop_token_ids=[5, 0, 5], min_tokens=3, max_tokens=3).status_code == 200
    request = server.engine.requests[-1]
    assert (request.stop_token_ids, request.min_generated_tokens) == (frozenset({0, 5}), 3)


def test_limits_are_the_settings(start_server: StartServer) -> None:
    server = start_server(max_choices=2, max_top_logprobs=1)
    assert server.chat(n=2, logprobs=True, top_logprobs=1).status_code == 200
    assert server.complete(n=2, logprobs=1).status_code == 200
    refused = [server.chat(n=3), server.chat(logprobs=True, top_logprobs=2), server.complete(logprobs=2)]
    assert [r.json()["error"]["param"] for r in refused] == ["n", "top_logprobs", "logprobs"]


def test_a_seed_is_drawn_where_none_is_given(server: Server) -> None:
    assert len({sampling(server).seed for _ in range(5)}) == 5


@pytest.mark.parametrize(
    ("seed", "key"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_every_64_bit_integer_is_a_seed(server: Server, seed: int, key: int) -> None:
    assert sampling(server, seed=seed).seed == key


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"temperature": 1e-320}, {"temperature": 0.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_p": 1e-320}, {"top_p": 1e-320}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 2**31 - 1}, {"top_k": 2**31 - 1}),
    ],
)
def test_borders_of_ranges_are_served(server: Server, fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    params = sampling(server, **fields)
    assert {name: getattr(params, name) for name in wanted} == wanted


def test_the_token_limit(server: Server, start_server: StartServer) -> None:
    def limit(of: Server, **fields: Any) -> int:
        assert of.chat(**fields).status_code == 200
        return of.engine.requests[-1].max_generated_tokens

    room = 512 - limit_prompt(server)
    assert limit(server) == room
    assert limit(server, max_tokens=5) == 5
    assert limit(server, max_completion_tokens=6) == 6
    assert limit(server, max_tokens=5, max_completion_tokens=6) == 6
    assert limit(server, max_tokens=10**6) == room
    assert limit(start_server()) == 0
    capped = start_server(default_max_tokens=64)
    assert limit(capped) == 64
    assert limit(capped, max_tokens=100) == 100


def limit_prompt(server: Server) -> int:
    server.chat()
    return len(server.engine.requests[-1].prompt_ids)


def test_ignore_eos_arrives(server: Server) -> None:
    server.chat(ignore_eos=True)
    server.chat()
    assert [request.ignore_eos for request in server.engine.requests] == [True, False]


def test_unknown_names_are_ignored(server: Server) -> None:
    assert server.chat(frobnicate={"a": [1]}, metadata={"x": "y"}, service_tier="auto").status_code == 200


def test_names_that_are_not_served_may_have_their_default(server: Server) -> None:
    neutral: dict[str, Any] = {
        "length_penalty": 1.0, "tools": [], "tool_choice": "auto", "functions": [],
        "response_format": {"type": "text"}, "modalities": ["text"], "store": False,
        "parallel_tool_calls": True, "skip_special_tokens": True,
    }  # fmt: skip
    assert server.chat(**neutral).status_code == 200
    assert server.chat(tool_choice="none").status_code == 200
    assert server.complete(suffix="").status_code == 200


def test_messages_become_the_models_prompt(server: Server) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "assistant", "content": "Yes.", "tool_calls": []},
        {"role": "user", "name": "Ann", "content": ""},
    ]
    assert server.chat(messages=messages).status_code == 200
    request = server.engine.requests[-1]
    spell = server.prompts.tokenizer.token_bytes
    assert b"".join(spell[i] for i in request.prompt_ids).decode() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    (span,) = request.spans
    assert server.prompts.tokenizer.decode(request.prompt_ids[span.start : span.end]) == "Yes."


@pytest.mark.parametrize("prompt", ["Once upon", ["Once upon"], [16175, 2114], [[16175, 2114]]])
def test_a_prompt_is_a_text_or_token_ids(server: Server, prompt: Any) -> None:
    assert server.complete(prompt).status_code == 200
    ids = server.engine.requests[-1].prompt_ids
    assert ids == tuple(server.prompts.tokenizer.encode("Once upon", special_tokens=True)) or ids == (16175, 2114)
    assert server.engine.requests[-1].spans == ()


def test_a_large_prompt_is_served_as_a_small_one(start_server: StartServer) -> None:
    server = start_server()
    text = "word " * 20_000
    assert server.complete(text).status_code == 200
    expected = tuple(server.prompts.tokenizer.encode(text, special_tokens=True))
    assert server.engine.requests[-1].prompt_ids == expected


def test_a_base_model_completes_but_does_not_chat(start_server: StartServer, prompts: PromptBuilder) -> None:
    server = start_server(prompts=PromptBuilder(with_template(prompts.tokenizer, None)))
    assert server.complete().status_code == 200
    response = server.chat()
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "chat_template_error"
