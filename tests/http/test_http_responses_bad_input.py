"""What /v1/responses refuses: the field at fault by its name; and what it takes because it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.bad_input import HUGE, INFINITY, NAN, assert_refused, dump, label, values
from tests.http.http_harness import MODEL, RESPONSES, Server, error_of

FLAT = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
RESPONSES_CASES: list[tuple[dict[str, Any], str]] = [
    *[({"input": v}, "input") for v in values(None, [], 5, True, {}, NAN, [{"role": "user", "content": "x"}] * 4097)],
    *[({"input": [v]}, "input.0") for v in values(None, "Hi", 5, [])],
    *[({"input": [{"role": v, "content": "x"}]}, "input.0.role") for v in
      values(None, "", "robot", "tool", 5, [], {}, "\ud800")],
    *[({"input": [{"role": "user", "content": v}]}, "input.0.content") for v in
      values(None, 5, {}, "\ud800", ["x"], [{}], [{"type": "refusal", "refusal": "no"}], [{"type": "input_text"}],
       [{"type": "input_text", "text": 5}], [{"type": "input_text", "text": "\udfff"}],
       [{"type": "input_image", "image_url": "x"}], [{"type": "input_file"}], [[]])],
    *[({"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": v}]}]}, "input.0.content") for v in
      values(None, 5, "\ud800")],
    ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
    *[({"input": [{"type": "item_reference", "id": v}]}, "input.0.id") for v in
      values(None, 5, "", [], "x" * 129, "\ud800")],
    *[({"input": [{"type": v, "role": "user", "content": "x"}]}, "input.0.type") for v in
      values("custom_tool_call", "web_search_call", 5, "", [], {})],
    *[({"input": [OUTPUT | {"call_id": v}]}, "input.0.call_id") for v in values(None, 5, "", [], "\ud800", "c")],
    *[({"input": [CALL, OUTPUT | {"output": v}]}, "input.1.output") for v in
      values(None, 5, {}, "\ud800", [5], [{"type": "input_image"}], [{"type": "refusal", "refusal": "x"}])],
    ({"input": [{"type": "function_call_output"}]}, "input.0.call_id"),
    *[({"input": [CALL | {"call_id": v}, OUTPUT]}, "input.0.call_id") for v in values(None, 5, "", [], "\ud800")],
    *[({"input": [CALL | {"name": v}, OUTPUT]}, "input.0.name") for v in values(None, 5, [], "\ud800")],
    *[({"input": [CALL | {"status": v}, OUTPUT]}, "input.0.status") for v in values("", "done", 5, [])],
    *[({"input": [CALL | {"arguments": v}, OUTPUT]}, "input.0.arguments") for v in
      values(5, {}, [], True, "\ud800")],
    ({"input": [CALL | {"arguments": "\ud800", "status": "incomplete"}]}, "input.0.arguments"),
    ({"input": [CALL | {"status": "incomplete", "arguments": "{"}, OUTPUT]}, "input.1.call_id"),
    ({"input": [{"type": "function_call"}]}, "input.0.call_id"),
    ({"input": [CALL]}, "input"), ({"input": [OUTPUT, CALL]}, "input.0.call_id"),
    *[({"tools": v}, "tools") for v in values(5, "x", {}, True, [FLAT] * 129)],
    *[({"tools": [v]}, "tools.0") for v in values(5, None, "f", [])],
    *[({"tools": [{"type": v, "name": "f"}]}, "tools.0.type") for v in
      values("web_search", "file_search", "custom", "mcp", None, 5, {}, "\ud800")],
    *[({"tools": [v]}, "tools.0.type") for v in
      values({}, {"type": "web_search"}, {"type": "mcp", "server_label": "s"})],
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
    ({"tools": [FLAT, FLAT]}, "tools.1.name"),
    *[({"tools": [FLAT | {"name": v}]}, "tools.0.name") for v in values(None, "", "a b", "x" * 65, 5, "é", "\ud800")],
    *[({"tools": [FLAT | {"description": v}]}, "tools.0.description") for v in values(5, [], "\ud800")],
    *[({"tools": [FLAT | {"strict": v}]}, "tools.0.strict") for v in values(5, "true")],
    *[({"tools": [FLAT | {"parameters": v}]}, "tools.0.parameters") for v in
      values(5, "x", [], {"type": "string"}, {"description": "\ud800"})],
    ({"tools": [FLAT | {"parameters": {"properties": {"a": {"type": "x"}}}, "strict": True}]}, "tools.0.parameters"),
    *[({"tools": [FLAT], "tool_choice": v}, "tool_choice") for v in
      values("f", "", 5, True, [], {}, {"type": "function"}, {"type": "function", "name": 5},
       {"type": "function", "name": "g"}, {"type": "function", "function": {"name": "f"}}, {"type": "web_search"})],
    *[({"tool_choice": v}, "tool_choice") for v in values("required", {"type": "function", "name": "f"})],
    *[({"tools": [FLAT], "parallel_tool_calls": v}, "parallel_tool_calls") for v in values(1, "false", [])],
    ({"tools": [FLAT], "ignore_eos": True}, "ignore_eos"), ({"tools": [FLAT], "min_tokens": 2}, "min_tokens"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": "a"}, 7]}, "input.1"),
    *[({"text": v}, "text") for v in values(5, "json", [])],
    *[({"reasoning": v}, "reasoning") for v in values("high", 5, [])],
    *[({"reasoning": {"summary": v}}, "reasoning.summary") for v in values("long", 5, [])],
    *[({"truncation": v}, "truncation") for v in values("", "middle", True, 5, {})],
    *[({"max_tool_calls": v}, "max_tool_calls") for v in values(0, "3", True, 2**31)],
    *[({"include": v}, "include") for v in
      values("reasoning.encrypted_content", 5, {}, ["file_search_call.results"] * 101)],
    *[({"include": ["file_search_call.results", v]}, "include.1") for v in
      values("message.output_text.logprobs", "x", None)],
    *[({"text": {"format": v}}, "text.format") for v in values(5, "json", {"type": "json_schema", "name": "x"})],
    *[({"text": {"format": {"type": v}}}, "text.format.type") for v in values(None, "xml", 5)],
    *[({"text": {"format": {"type": "json_schema", "schema": v}}}, "text.format.schema") for v in
      values(5, "{", {"type": "objec"})],
    *[({"instructions": v}, "instructions") for v in values(5, True, [], ["x"], {}, "\ud800")],
    *[({"previous_response_id": v}, "previous_response_id") for v in values(5, True, [], {}, "", "x" * 129, "x" * 10**6,
      "\ud800")],
    *[({"store": v}, "store") for v in values("true", 1, 0, [], "")],
    *[({"max_output_tokens": v}, "max_output_tokens") for v in
      values(0, -1, "5", True, 1.0, 2**31, HUGE, NAN, INFINITY, [], {})],
    *[({"metadata": v}, "metadata") for v in
      values(5, "x", [], {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)})],
    *[({"metadata": {"a": v}}, "metadata.a") for v in values(5, None, True, [], {}, "\ud800")],
    *[({"temperature": v}, "temperature") for v in values("1", True, NAN, INFINITY, -0.1, 2.1, HUGE)],
    ({"presence_penalty": 3}, "presence_penalty"), ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"min_tokens": 2, "max_output_tokens": 1}, "min_tokens"),
    *[({"top_p": v}, "top_p") for v in values("1", NAN, 0, 1.1)],
    *[({"stream": v}, "stream") for v in values("true", 1, [])],
    *[({"user": v}, "user") for v in values(5, "x" * 4097)],
    *[({"session_id": v}, "session_id") for v in values(5, "", "a\nb", "x" * 257)],
    *[({"cache_salt": v}, "cache_salt") for v in values(5, "x" * 4097)],
    *[({"stop": v}, "stop") for v in values("", ["a", 5], ["x"] * 17)],
    ({"model": 5}, "model"),
]  # fmt: skip

RESPONSES_NOT_SERVED: list[tuple[str, Any]] = [
    ("background", True), ("background", "yes"),
    ("conversation", "conv_1"), ("conversation", {"id": "conv_1"}),
    ("prompt", {"id": "pmpt_1"}), ("top_logprobs", 3), ("top_logprobs", 10**9), ("n", 2),
    ("context_management", [{"type": "compaction"}]), ("moderation", {}), ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"a": 1}), ("messages", []), ("max_tokens", 5), ("max_completion_tokens", 5),
    ("best_of", 2), ("logprobs", True), ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}),
]  # fmt: skip

RESPONSES_DEFAULTS: list[tuple[str, Any]] = [
    ("tools", []), ("tools", None), ("tool_choice", "auto"), ("tool_choice", "none"), ("parallel_tool_calls", True),
    ("parallel_tool_calls", False), ("max_tool_calls", None), ("max_tool_calls", 3),
    ("background", False), ("reasoning", {}),
    ("reasoning", {"effort": None, "summary": None, "generate_summary": None}),
    ("reasoning", {"effort": "none", "summary": "auto", "context": "auto", "mode": "standard"}),
    ("text", {"format": {"type": "text"}}), ("text", {}), ("text", {"format": {"type": "json_object"}}), ("text", None),
    ("include", []), ("include", ["reasoning.encrypted_content", "web_search_call.action.sources"]),
    ("truncation", "disabled"), ("truncation", "auto"), ("top_logprobs", 0),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_obfuscation": False}), ("metadata", {}), ("metadata", None),
    ("store", None), ("instructions", None), ("previous_response_id", None),
    ("service_tier", "auto"), ("prompt_cache_key", "x"), ("safety_identifier", "x"), ("conversation", None),
    ("instructions", ""), ("input", ""), ("stop", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), RESPONSES_CASES, ids=[label(case) for case in RESPONSES_CASES])
def test_a_bad_response_request_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert_refused(server, RESPONSES, {"model": MODEL, "input": "x", **fields}, param)


@pytest.mark.parametrize(("name", "value"), RESPONSES_NOT_SERVED, ids=[label(case) for case in RESPONSES_NOT_SERVED])
def test_what_responses_do_not_serve_is_refused_by_name(server: Server, name: str, value: Any) -> None:
    response = server.client.post(RESPONSES, content=dump({"input": "x", name: value}))
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), RESPONSES_DEFAULTS, ids=[label(case) for case in RESPONSES_DEFAULTS])
def test_what_means_the_default_is_accepted(server: Server, name: str, value: Any) -> None:
    assert server.client.post(RESPONSES, content=dump({"input": "x", name: value})).status_code == 200


@pytest.mark.parametrize("value", ["resp_missing", "x", "\x00", "é", "../../etc", "a" * 128])
def test_an_unknown_previous_response_is_not_found(server: Server, value: str) -> None:
    response = server.respond(previous_response_id=value)
    assert (response.status_code, error_of(response)["param"]) == (404, "previous_response_id")
    assert server.engine.requests == []
