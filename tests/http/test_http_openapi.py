"""The OpenAPI document, and what a client sends that was generated from it."""

from __future__ import annotations

import pytest
import schemathesis
from http_harness import CHAT, COMPLETIONS, RESPONSES, Server
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from serve_app.openai.protocol import ChatRequest
from serve_app.openai.responses.protocol import ResponsesRequest


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
        assert set(schema["properties"]) == set(model.model_fields)
    assert paths[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"] == ["messages"]
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


def generate(server: Server, method: str, path: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        case.call_and_validate(checks=[not_a_server_error])

    send()


@pytest.mark.parametrize(("method", "path"), BODIES + OTHERS)
def test_no_request_that_fits_the_document_gets_a_500(server: Server, method: str, path: str) -> None:
    generate(server, method, path, GenerationMode.POSITIVE)


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_no_request_that_does_not_fit_it_gets_a_500(server: Server, method: str, path: str) -> None:
    generate(server, method, path, GenerationMode.NEGATIVE)
