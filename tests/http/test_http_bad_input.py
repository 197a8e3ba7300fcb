"""Whatever a client sends: the stated status, the envelope, the field at fault; and the next request is served."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.openai.protocol import ChatRequest, CompletionRequest
from serve_app.openai.responses.protocol import ResponsesRequest
from serve_app.text.prompts import PromptBuilder
from tests.http.bad_input import HUGE, INFINITY, NAN, assert_refused, dump, label, values
from tests.http.http_harness import CHAT, COMPLETIONS, MODEL, RESPONSES, Server, StartServer, error_of
from tests.support.tokenizers import with_template

USER = [{"role": "user", "content": "Hi"}]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


TOOLS = [tool()]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

# (fields of a chat request, the field that the error must name)
CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    *[({"temperature": v}, "temperature") for v in
      values("0.5", "", True, NAN, INFINITY, -INFINITY, -0.001, 2.001, -1e-320, 1e308, HUGE, -HUGE, [], {}, [0.5])],
    *[({"top_p": v}, "top_p") for v in values("1", False, NAN, INFINITY, 0, 0.0, -0.1, 1.0001, HUGE, [], {})],
    *[({"top_k": v}, "top_k") for v in values("5", True, 1.5, 5.0, -2, 2**31, HUGE, NAN, [], {})],
    *[({"seed": v}, "seed") for v in values("1", True, 1.0, 0.5, 2**64, -(2**64) - 1, HUGE, NAN, [1], {})],
    *[({"max_tokens": v}, "max_tokens") for v in
      values(0, -1, "5", True, 1.0, 1.5, 2**31, HUGE, NAN, INFINITY, [], {})],
    *[({"max_completion_tokens": v}, "max_completion_tokens") for v in values(0, -1, "5", False, 2.0, HUGE)],
    *[({"stop": v}, "stop") for v in
      values("", [""], ["a", ""], 5, True, {}, [5], [None], [["a"]], ["\ud800"], "\udfff", ["x"] * 17, "x" * 513)],
    *[({"stream": v}, "stream") for v in values("true", 1, 0, [], {}, "")],
    *[({"stream": True, "stream_options": v}, "stream_options") for v in values("x", 1, True, [])],
    *[({"stream": True, "stream_options": {"include_usage": v}}, "stream_options.include_usage")
      for v in values("yes", 1, [])],
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    *[({"n": v}, "n") for v in values(0, -1, "1", True, 1.0, 9, 5_000_000, 2**31, HUGE, NAN, [], {})],
    *[({"best_of": v}, "best_of") for v in values(0, 2, "1", True, HUGE, [])],
    ({"n": 3, "best_of": 2}, "best_of"),
    *[({"presence_penalty": v}, "presence_penalty") for v in
      values("0", False, -2.001, 2.1, NAN, INFINITY, HUGE, [], {})],
    *[({"frequency_penalty": v}, "frequency_penalty") for v in values("0", True, -2.001, 3, NAN, -INFINITY, -HUGE, [])],
    *[({"repetition_penalty": v}, "repetition_penalty") for v in
      values("1", True, 0, -1, 1e-320, 0.009, 100.1, NAN, INFINITY, HUGE, [])],
    *[({"no_repeat_ngram_size": v}, "no_repeat_ngram_size") for v in values("3", True, 1.0, -1, 2**31, HUGE, NAN, [])],
    *[({"min_p": v}, "min_p") for v in values("0", True, -0.1, 1.1, NAN, INFINITY, HUGE, [])],
    *[({"min_tokens": v}, "min_tokens") for v in values("1", True, 1.0, -1, 2**31, HUGE, NAN, [], 513)],
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    *[({"logit_bias": v}, "logit_bias") for v in
      values("x", [], 5, True, {"a": 1}, {"": 1}, {"-1": 1}, {"1.0": 1}, {" 5": 1}, {"05": 1}, {"\u0665": 1},
       {"5\n": 1}, {"49152": 1}, {"99999999": 1}, {"9" * 5000: 1}, {"\ud800": 1}, {"5": "1"}, {"5": True}, {"5": None},
       {"5": [1]}, {"5": NAN}, {"5": INFINITY}, {"5": 100.1}, {"5": -101}, {"5": HUGE},
       {str(i): 1 for i in range(1025)})],
    *[({"stop_token_ids": v}, "stop_token_ids") for v in
      values("x", 5, True, {}, ["5"], [True], [1.0], [None], [[5]], [-1], [49152], [2**63], [HUGE], [NAN], [5] * 257)],
    *[({"logprobs": v}, "logprobs") for v in values(1, 0, "true", [], 5.0)],
    *[({"logprobs": True, "top_logprobs": v}, "top_logprobs") for v in
      values(-1, 21, 10**9, 1e9, HUGE, "5", True, 5.0, NAN, [], {})],
    ({"top_logprobs": 5}, "top_logprobs"), ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    *[({"ignore_eos": v}, "ignore_eos") for v in values("true", 1, [])],
    *[({"user": v}, "user") for v in values(5, True, [], {}, "x" * 4097, "\ud800")],
    *[({"session_id": v}, "session_id") for v in
      values(5, True, [], "", "a\nb", "a\r\nb", "\x00", "x" * 257, "x" * 10**6, "\ud83d", "\u2028", "\x7f")],
    *[({"cache_salt": v}, "cache_salt") for v in values(5, True, [], {}, "x" * 4097, "\ud800")],
    *[({"model": v}, "model") for v in values(5, True, [], {}, "\ud800")],
    *[({"messages": v}, "messages") for v in values(None, [], "Hi", {}, 5, True, USER * 4097)],
    *[({"messages": [v]}, "messages.0") for v in values(None, "Hi", 5, [])],
    *[({"response_format": v}, "response_format") for v in
      values("json", 5, [], {"type": "json_schema"}, {"type": "json_schema", "json_schema": None})],
    *[({"response_format": {"type": v}}, "response_format.type") for v in
      values(None, "", "xml", 5, {}, "structural_tag")],
    ({"response_format": {}}, "response_format.type"),
    *[({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": v}}},
       "response_format.json_schema.schema") for v in
      values(5, [], True, "", "{", "5", "\ud800", {"type": "objec"}, {"not": {}}, {"$ref": "#/x"}, "[",
       {"type": "string", "pattern": "("}, {"type": "string", "format": "nothing"}, {"enum": []},
       {"const": "x" * 2**18}, {"const": -2**63}, {"type": "integer", "minimum": -1e30}, {"enum": [2**53 + 1]})],
    *[({"structured_outputs": v}, "structured_outputs") for v in
      values("json", 5, [], {}, {"regex": "a", "choice": ["a"]}, {"json_object": False}, {"regex": None})],
    *[({"structured_outputs": {"regex": v}}, "structured_outputs.regex") for v in
      values("", "(a", 5, ["a"], "\ud800", "a{9,1}")],
    *[({"structured_outputs": {"choice": v}}, "structured_outputs.choice") for v in values([], "a", 5, {})],
    *[({"structured_outputs": {"choice": ["a", v]}}, "structured_outputs.choice.1") for v in
      values("", 5, None, "\ud800")],
    *[({"structured_outputs": {"grammar": v}}, "structured_outputs.grammar") for v in
      values("", "x", "start: b", 5, "start: \"a", "%",
       'start: %json {"const": -9223372036854775808}')],
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
    ({"messages": [{"role": "user", "content": "Hi"}, 7]}, "messages.1"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages.0.content"),
    *[(message(role=v), "messages.0.role") for v in
      values(None, "", "robot", "USER", "function", 5, True, [], {}, "\ud800", "x" * 10**5)],
    *[(message(content=v), "messages.0.content") for v in
      values(None, 5, True, {}, {"type": "text", "text": "x"}, "\ud800", "a\udc00b", ["x"], [5], [None], [{}],
       [{"type": "text"}], [{"type": "text", "text": None}], [{"type": "text", "text": 5}],
       [{"type": "text", "text": "\ud800"}], [{"type": "image_url", "image_url": {"url": "x"}}],
       [{"type": "input_audio"}], [{"text": "x"}], [[]])],
    (message(role="assistant", content=None, tool_calls=[{"id": "1"}]), "messages.0.tool_calls.0.function"),
    *[(message(role="assistant", content=None, tool_calls=v), "messages.0.tool_calls") for v in
      values(5, "x", {})],
    (message(role="assistant", content=None, tool_calls=[5]), "messages.0.tool_calls.0"),
    *[(message(role="assistant", content=None,
               tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": v}}]),
       "messages.0.tool_calls.0.function.arguments")
      for v in values(5, {}, [], True, "\ud800")],
    (message(role="user", content="x", tool_calls=CALLS), "messages.0"),
    (message(role="tool", content="x"), "messages.0"),
    (message(role="user", content="x", tool_call_id="1"), "messages.0"),
    (message(role="tool", content=None, tool_call_id="1"), "messages.0.content"),
    (message(role="tool", content="x", tool_call_id=5), "messages.0.tool_call_id"),
    *[({"tools": v}, "tools") for v in values(5, "x", {}, True, TOOLS * 129)],
    *[({"tools": [v]}, "tools.0") for v in values(5, None, "f", [])],
    *[({"tools": [{"type": "function", "function": v}]}, "tools.0.function") for v in values(None, 5, "f", [])],
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    *[({"tools": [{"type": v}]}, "tools.0.type") for v in values("web_search", "custom", None, 5, {}, "\ud800")],
    ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": TOOLS * 2}, "tools.1.function.name"),
    *[({"tools": [tool(name=v)]}, "tools.0.function.name") for v in
      values(None, "", "a b", "x" * 65, 5, "é", "\ud800")],
    *[({"tools": [tool(description=v)]}, "tools.0.function.description") for v in values(5, [], "\ud800")],
    *[({"tools": [tool(parameters=v)]}, "tools.0.function.parameters") for v in
      values(5, "x", [], {"type": "string"}, {"type": ["object"]}, {"description": "\ud800"})],
    *[({"tools": [tool(parameters=v, strict=True)]}, "tools.0.function.parameters") for v in
      values({"properties": {"a": {"type": "objec"}}}, {"properties": 5}, {"$ref": "#/nowhere"})],
    ({"tools": [tool(parameters={"not": {}}, strict=True)]}, "tools.0.function.parameters"),
    *[({"tools": TOOLS, "tool_choice": v}, "tool_choice") for v in
      values("f", "", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": {}},
       {"type": "function", "function": {"name": "g"}}, {"type": "x", "function": {"name": "f"}})],
    *[({"tool_choice": v}, "tool_choice") for v in values("required", {"type": "function", "function": {"name": "f"}})],
    *[({"tools": TOOLS, "parallel_tool_calls": v}, "parallel_tool_calls") for v in values(1, "false", [])],
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tools": TOOLS, "logprobs": True}, "logprobs"),
    ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"), ({"tools": TOOLS, "min_tokens": 2}, "min_tokens"),
    (message(role="assistant", function_call={"name": "f"}), "messages.0.function_call"),
    (message(role="assistant", audio={"id": "audio_1"}), "messages.0.audio"),
    *[(message(role="assistant", refusal=v), "messages.0.refusal") for v in values(5, [], "\ud800")],
    (message(refusal="no"), "messages.0"),
    *[(message(role="assistant", content=[{"type": "refusal", "refusal": v}]), "messages.0.content") for v in
      values(None, 5, "\ud800")],
    (message(content=[{"type": "refusal", "refusal": "no"}]), "messages.0.content"),
]  # fmt: skip

# Things that the API knows and this server does not support: said by name, never ignored.
NOT_SERVED: list[tuple[str, Any]] = [
    ("length_penalty", 2),
    ("functions", [{}]), ("function_call", {"name": "f"}),
    ("use_beam_search", True),
    ("modalities", ["text", "audio"]), ("audio", {}), ("store", True), ("echo", True),
    ("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"a": 1}), ("continue_final_message", True),
    ("add_generation_prompt", False), ("bad_words", ["x"]),
    ("guided_json", {}), ("guided_regex", "a"), ("guided_choice", ["a"]), ("guided_grammar", "x"),
    ("skip_special_tokens", False), ("prompt_logprobs", 1),
    ("include_stop_str_in_output", True), ("documents", [{}]), ("web_search_options", {}), ("moderation", {}),
]  # fmt: skip

COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    *[({"prompt": v}, "prompt") for v in
      values(None, "", [], 5, True, {}, ["a"] * 129, [[1]] * 129, [""], [[]], [1, "a"], [True], [1.0], [None], [-1],
       [49152], [2**63], [HUGE], [NAN], "\ud800", ["\udc00"], [["a"]], [[[1]]], [{}])],
    *[({"prompt": ["a", v, "b"]}, "prompt.1") for v in
      values(None, "", [], 5, True, {}, "\ud800", ["a"], [1.0], [True], [-1], [49152], [HUGE], [[1]])],
    ({"prompt": ["a", "b"], "session_id": "s"}, "prompt"),
    ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"n": 9}, "n"), ({"n": 0}, "n"),
    *[({"echo": v}, "echo") for v in values("true", 1, [])],
    *[({"echo": True, "logprobs": v}, "echo") for v in values(0, 5)],
    *[({"logprobs": v}, "logprobs") for v in values(-1, 21, 10**9, HUGE, True, False, "5", 1.0, NAN, [])],
    ({"temperature": "1"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), CHAT_CASES, ids=[label(case) for case in CHAT_CASES])
def test_a_bad_chat_request_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert_refused(server, CHAT, {"model": MODEL, "messages": USER, **fields}, param)


@pytest.mark.parametrize(("name", "value"), NOT_SERVED, ids=[label(case) for case in NOT_SERVED])
def test_what_is_not_served_is_refused_by_name(server: Server, name: str, value: Any) -> None:
    response = server.client.post(CHAT, content=dump({"messages": USER, name: value}))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert f"`{name}` is not supported by this server: remove it" in error["message"]
    assert server.chat().status_code == 200


@pytest.mark.parametrize(("fields", "param"), COMPLETION_CASES, ids=[label(case) for case in COMPLETION_CASES])
def test_a_bad_completion_request_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert_refused(server, COMPLETIONS, {"model": MODEL, "prompt": "x", **fields}, param)


def test_missing_messages_and_prompt_are_named(server: Server) -> None:
    assert_refused(server, CHAT, {"model": MODEL}, "messages")
    server.engine.reset()
    assert_refused(server, COMPLETIONS, {"model": MODEL}, "prompt")
    server.engine.reset()
    assert_refused(server, RESPONSES, {"model": MODEL}, "input")


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"}", b"'{}'", b"{}x", b'{"messages": [}', b'{"a": "\n"}', b'{"a": "\x00"}', b"\xff\xfe",
        b'{"a": "\xff"}', b"\xef\xbb\xbf{}", b"[]", b"5", b'"x"', b"null", b"true", b"[" * 100_000, b'{"a":' * 50_000,
        b'{"a": ' + b"1" * 10_000 + b"}", b'{"a": tru}', b"{'a': 1}",
    ],
    ids=lambda body: label(body[:12]),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(server: Server, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"
    assert server.chat().status_code == 200


def test_an_unknown_model_is_not_found(server: Server) -> None:
    for model in ("gpt-4", "", "x" * 10_000, "SMOLLM2", "smollm2 "):
        response = server.chat(model=model)
        assert response.status_code == 404
        assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")


def test_a_prompt_that_fills_the_context_is_refused_with_the_true_numbers(server: Server) -> None:
    for length in (511, 512, 513, 5000):
        response = server.complete([5] * length)
        if length < 512:
            assert response.status_code == 200
            assert server.engine.requests[-1].max_generated_tokens == 1
            continue
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert f"{length} tokens" in error["message"] and "512 tokens" in error["message"]
    assert error_of(server.complete([[5] * 511, [5] * 512]))["param"] == "prompt.1"
    response = server.chat("word " * 600)
    assert error_of(response)["param"] == "messages"
    assert len(server.engine.requests) == 1


def test_a_body_beyond_the_limit_is_refused_announced_or_not(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=10_000)
    body = dump({"messages": [{"role": "user", "content": "x" * 20_000}]})
    assert error_of(server.client.post(CHAT, content=body))["code"] == "request_too_large"

    def pieces() -> Any:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    response = server.client.post(CHAT, content=pieces())
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert server.chat("x" * 5000).status_code == 200
    assert len(server.engine.requests) == 1


def test_a_template_that_refuses_is_a_bad_request(start_server: StartServer, server: Server) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    strict = PromptBuilder(with_template(server.prompts.tokenizer, source))
    response = start_server(prompts=strict).chat()
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("messages", "chat_template_error")
    assert "roles must alternate" in error["message"]


def test_odd_but_valid_text_is_served(server: Server) -> None:
    for text in (
        "",
        "\x00",
        "\ufffd",
        "😀",
        "\u202e",
        "a" * 1000,
        "{{ 7 * 7 }}",
        "<|im_end|>",
        "\r\n",
        "\ue0000\ue001",
    ):
        assert server.chat(text).status_code == 200, text
    assert server.client.post(CHAT, content=b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}').is_success


JSON_TYPES = ("application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json;a=b")
OTHER_TYPES = ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "text/json", "json", "")
TYPED = {
    CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}, "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [80]}, "/v1/sessions/a/fork": {"session_id": "b"},
}  # fmt: skip


@pytest.mark.parametrize("path", TYPED)
def test_a_body_is_json_by_its_type(server: Server, path: str) -> None:
    """What a browser sends for a page of another origin without asking has one of the others."""
    body = dump(TYPED[path])
    for kind in JSON_TYPES:
        assert server.client.post(path, content=body, headers={"content-type": kind}).status_code == 200, kind
    server.engine.requests.clear()
    for kind in OTHER_TYPES:
        refused = server.client.post(path, content=body, headers={"content-type": kind})
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (415, "unsupported_media_type"), kind
        assert "Content-Type: application/json" in error["message"]
    assert server.engine.requests == []


def test_a_body_without_a_type_is_refused(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        refused = client.post(CHAT, content=dump({"messages": USER}))
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_media_type")


FIELDS = [
    *ChatRequest.model_fields, *CompletionRequest.model_fields, *ResponsesRequest.model_fields,
    "tools", "response_format", "text", "reasoning", "prompt", "tokens",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    path=st.sampled_from([CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"]),
    valid=st.booleans(),
)
def test_no_json_gets_a_500(server: Server, fields: dict[str, Any], path: str, valid: bool) -> None:
    content = fields
    if valid:  # all that is needed, of which some may be spoilt
        needed: dict[str, dict[str, Any]] = {
            CHAT: {"messages": USER},
            RESPONSES: {"input": "x"},
            "/detokenize": {"tokens": [1]},
        }
        content = needed.get(path, {"prompt": "x"}) | fields
    response = server.client.post(path, content=dump(content))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert error_of(response)["param"].split(".")[0] in {*FIELDS, "model"}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        (CHAT, {"max_tokens": "5"}, 'max_tokens must be a whole number, not "5"'),
        (CHAT, {"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        (CHAT, {"max_tokens": [1] * 50}, "max_tokens must be a whole number, not a list"),
        (CHAT, {"temperature": 2.5}, "temperature must be at most 2, not 2.5"),
        (CHAT, {"temperature": "x" * 50}, "temperature must be a number, not a text of 50 characters"),
        (CHAT, {"temperature": NAN}, "temperature must be a finite number, not NaN"),
        (CHAT, {"top_p": 0}, "top_p must be more than 0, not 0"),
        (CHAT, {"stream": 1}, "stream must be true or false, not 1"),
        (CHAT, {"messages": "Hi"}, 'messages must be a list, not "Hi"'),
        (CHAT, {"messages": []}, "messages must not be empty"),
        (CHAT, {"messages": [7]}, "messages.0 must be an object, not 7"),
        (CHAT, {"n": 9}, "n must be at most 8, not 9"),
        (CHAT, {"stop": ["x"] * 17}, "stop: at most 16 stop strings are allowed, not 17"),
        (CHAT, {"user": "x" * 4097}, "user may have at most 4096 characters, not 4097"),
        (CHAT, {"tools": [{}]}, "tools.0.type is needed"),
        (
            CHAT,
            {"functions": [{}]},
            "`functions` is not supported by this server: remove it, or set it to [].",
        ),
        (CHAT, {"functions": {"a": 1}}, "`functions` is not supported by this server: remove it, or set it to {}."),
        (CHAT, {"functions": 5}, "`functions` is not supported by this server: remove it."),
        (CHAT, {"length_penalty": 2}, "`length_penalty` is not supported by this server: remove it, or set it to 1."),
        (CHAT, {"audio": {}}, "`audio` is not supported by this server: remove it."),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt.1: must be a string or a list of token ids"),
        (COMPLETIONS, {"prompt": [49152]}, "prompt must have token ids from 0 to 49151, not 49152"),
        (RESPONSES, {"metadata": 5}, "metadata must be an object, not 5"),
    ],
)
def test_an_error_says_what_must_be_and_what_was(
    server: Server, path: str, fields: dict[str, Any], message: str
) -> None:
    content = {"messages": USER, "prompt": "x", "input": "x"}
    if path == RESPONSES:
        del content["messages"], content["prompt"]
    response = server.client.post(path, content=dump(content | fields))
    assert error_of(response)["message"] == message


def test_a_number_too_large_for_a_float_is_refused_by_name(server: Server) -> None:
    response = server.client.post(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}')
    assert (response.status_code, error_of(response)["param"]) == (400, "top_p")
