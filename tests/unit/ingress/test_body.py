"""How much of a body is looked at before anything is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.ingress.body import MAX_DEPTH, MAX_VALUES, json_object
from serve_app.ingress.errors import ApiError
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.limits import check_lengths
from serve_app.openai.protocol import ChatRequest
from serve_app.openai.responses.protocol import ResponsesRequest
from serve_app.openai.strict import Strict
from serve_app.openai.tokens import DetokenizeRequest, TokenizeRequest


def nested(levels: int, around: str = "[]") -> bytes:
    """An object with a value of so many levels in it."""
    opening = {"[]": b"[", "{}": b'{"a":'}[around]
    return b'{"x":' + opening * levels + b"0" + around[1].encode() * levels + b"}"


@pytest.mark.parametrize("around", ["[]", "{}"])
@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 100_000])
def test_what_is_too_deep_is_refused(levels: int, around: str) -> None:
    with pytest.raises(ApiError, match="nested too deeply") as refused:
        json_object(nested(levels, around))
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("around", ["[]", "{}"])
def test_what_is_just_not_too_deep_is_taken_and_brackets_in_texts_do_not_count(around: str) -> None:
    json_object(nested(MAX_DEPTH - 1, around))
    assert json_object(json.dumps({"x": "[{," * MAX_VALUES}).encode())


@pytest.mark.parametrize(
    "value", [[0] * MAX_VALUES, [{"a": [0, 0]}] * (MAX_VALUES // 4), {str(i): i for i in range(MAX_VALUES)}]
)
def test_too_many_values_are_refused_but_for_ids(value: object) -> None:
    data = json.dumps({"x": value}).encode()
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
        json_object(data)
    assert json_object(data, uncounted=frozenset({"x"})) == {"x": value}


SETTINGS = IngressSettings(model_ids=("m",))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("messages", SETTINGS.max_messages),
        ("input", SETTINGS.max_messages),
        ("tools", SETTINGS.max_tools),
        ("stop", SETTINGS.max_stop_strings),
        ("stop_token_ids", SETTINGS.max_stop_token_ids),
    ],
)
def test_lists_are_bounded_by_their_lengths_whatever_is_in_them(name: str, most: int) -> None:
    check_lengths({name: [None] * most}, SETTINGS)
    with pytest.raises(ApiError, match=f"{name}: at most {most}"):
        check_lengths({name: [None] * (most + 1)}, SETTINGS)


def test_biases_and_prompts_are_bounded_too() -> None:
    with pytest.raises(ApiError, match="logit_bias: at most 1024"):
        check_lengths({"logit_bias": dict.fromkeys(map(str, range(1025)))}, SETTINGS)
    with pytest.raises(ApiError, match="prompt: at most 128 prompts"):
        check_lengths({"prompt": [[]] * 129}, SETTINGS)
    check_lengths({"prompt": [1] * 10_000}, SETTINGS)  # the ids of one


CALL = {"role": "assistant", "content": "", "tool_calls": [0] * 1000}


@pytest.mark.parametrize(
    ("model", "content"),
    [
        (ChatRequest, {"messages": [0] * 1000}),
        (ChatRequest, {"messages": [CALL]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [0] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"choice": [0] * 1000}}),
        (ResponsesRequest, {"input": "a", "tools": [0] * 1000}),
        (TokenizeRequest, {"messages": [0] * 1000}),
        (DetokenizeRequest, {"tokens": ["a"] * 1000}),
    ],
)
def test_a_list_of_invalid_items_is_looked_at_up_to_the_first(model: type[Strict], content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(content)
    assert refused.value.error_count() == 1
