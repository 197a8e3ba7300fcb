"""The OpenAPI document, and what a client sends that was generated from it."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response

from serve_app.openai.narrowing import numbers_below
from serve_app.openai.protocol import ChatRequest
from serve_app.openai.responses.protocol import ResponsesRequest
from tests.http.http_harness import CHAT, COMPLETIONS, RESPONSES, Server


def test_every_path_and_every_body_is_described(server: Server) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        CHAT, COMPLETIONS, RESPONSES, f"{RESPONSES}/{{response_id}}", f"{RESPONSES}/{{response_id}}/cancel",
        "/v1/models", "/v1/models/{model}", "/v1/sessions", "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/fork", "/tokenize", "/detokenize", "/health", "/ready",
    }  # fmt: skip
    for path, model in ((CHAT, ChatRequest), (RESPONSES, ResponsesRequest)):
        body = paths[path]["post"]["requestBody"]
        assert body["required"] is True
        schema = body["content"]["application/json"]["schema"]
        assert set(schema["properties"]) >= set(model.model_fields)
    assert paths[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"] == ["messages"]
    listed = server.client.get("/openapi.json").json()["components"]["schemas"]["SessionList"]
    assert listed["required"] == ["data", "incomplete", "unanswered_replicas"]
    assert all("4XX" in operation["responses"] for path in paths.values() for operation in path.values())
    assert "$defs" not in str(paths)


FORK = "/v1/sessions/{session_id}/fork"

# With a body there is much that does not fit the document; a path's only parameter is any text.
BODIES = [("POST", path) for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize", FORK)]
OTHERS = [
    ("GET", f"{RESPONSES}/{{response_id}}"), ("DELETE", f"{RESPONSES}/{{response_id}}"),
    ("POST", f"{RESPONSES}/{{response_id}}/cancel"), ("GET", "/v1/models/{model}"), ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{session_id}"), ("DELETE", "/v1/sessions/{session_id}"),
]  # fmt: skip


# What only several fields together say, or the model: the document names them in words.
CODES = ("context_length_exceeded", "chat_template_error", "invalid_grammar")
FIELDS = (
    "stream_options|top_logprobs|logprobs|best_of|min_tokens|tool_choice|echo|ignore_eos|structured_outputs|session_id"
    r"|tools\.\d+(\.function)?\.name|input(\..+)?"  # items belong together: a call needs its output
)


def no_refusal_but_those_that_are_named(response: Response) -> None:
    """Of a request that fits the document. An id or a name of what there is not is a 404."""
    if response.status_code in (400, 413, 415, 422):
        error = response.json()["error"]
        named = error["code"] in CODES or re.fullmatch(FIELDS, error["param"] or "")
        assert named or "only one prompt" in error["message"], error


def whole_numbers(value: Any) -> Any:
    """A schema can't tell 1.0 from 1; this API takes no whole number from one with a fraction."""
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def generate(server: Server, method: str, path: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    # The same cases each time: what this finds anew belongs into a change that is about it.
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case[Any]) -> None:
        case.body = whole_numbers(case.body)
        response = case.call_and_validate(checks=[not_a_server_error])
        if mode is GenerationMode.POSITIVE and (method, path) in BODIES:
            no_refusal_but_those_that_are_named(response)

    send()


@pytest.mark.parametrize(("method", "path"), BODIES + OTHERS)
def test_a_request_that_fits_the_document_is_served(server: Server, method: str, path: str) -> None:
    generate(server, method, path, GenerationMode.POSITIVE)


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_no_request_that_does_not_fit_it_gets_a_500(server: Server, method: str, path: str) -> None:
    generate(server, method, path, GenerationMode.NEGATIVE)


SAID = [{"role": "user", "content": "Hi"}]
UNFIT: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "a", "messages": SAID}),
    ("/tokenize", {"messages": SAID, "add_special_tokens": True}),
    ("/detokenize", {"tokens": [49152]}),
    (CHAT, {"messages": [{"role": "tool"}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}),
    (CHAT, {"messages": SAID, "n": 9}),
    (CHAT, {"messages": SAID, "top_logprobs": 21, "logprobs": True}),
    (CHAT, {"messages": SAID, "stop": ""}),
    (CHAT, {"messages": SAID, "stop": ["a"] * 17}),
    (CHAT, {"messages": SAID, "logit_bias": {"49152": 1}}),
    (CHAT, {"messages": SAID, "logit_bias": {"01": 1}}),
    (CHAT, {"messages": SAID, "functions": [{}]}),
    (CHAT, {"messages": SAID, "response_format": {"type": "json_schema"}}),
    (CHAT, {"messages": SAID, "structured_outputs": {}}),
    (CHAT, {"messages": SAID, "structured_outputs": {"regex": "a", "choice": ["a"]}}),
    (CHAT, {"messages": SAID, "tool_choice": {"type": "function"}}),
    (CHAT, {"messages": SAID, "session_id": ""}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [[]]}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}),
    (RESPONSES, {"input": "a", "metadata": {"a": "b" * 513}}),
    (RESPONSES, {"input": "a", "n": 2}),
]


@pytest.mark.parametrize(("path", "body"), UNFIT, ids=lambda value: str(value)[:60])
def test_what_is_refused_does_not_fit_the_document(server: Server, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body).status_code == 400
    described = server.client.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]
    schema = described["content"]["application/json"]["schema"]
    assert not jsonschema_rs.is_valid(schema, body)
    fitting = {"/detokenize": {"tokens": [1]}, CHAT: {"messages": SAID}, RESPONSES: {"input": "a"}}
    assert jsonschema_rs.is_valid(schema, fitting.get(path, {"prompt": "a"}))


@pytest.mark.parametrize("bound", [1, 2, 9, 10, 11, 100, 128, 999, 1000, 5025])
def test_a_pattern_matches_the_numbers_below_a_bound_and_no_other(bound: int) -> None:
    pattern = re.compile(numbers_below(bound))
    assert [number for number in range(2 * bound + 20) if pattern.fullmatch(str(number))] == list(range(bound))
    assert not pattern.fullmatch("00") and not pattern.fullmatch("")
