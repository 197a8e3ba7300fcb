"""Items of a response's input: messages, calls of functions, and what these gave.

Whatever a response gave comes back as it is: names that are not here, such as id and annotations, are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo

from serve_app.ingress.errors import bad_value
from serve_app.openai.protocol import ROLES, SAID, TEXT_PART, check_role, said_text
from serve_app.openai.strict import Strict, Text, refuse, whole_text
from serve_app.openai.tools import parsed_arguments
from serve_app.openai.wording import first_error

_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
_STRING = {"type": "string"}
_ITEMS: list[object] = [
    {
        "type": "object",
        "properties": {
            "type": {"const": "message"},
            "role": {"type": "string", "enum": list(ROLES)},
            "content": SAID,
        },
        "required": ["role", "content"],
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "function_call"},
            "call_id": _STRING,
            "name": _STRING,
            "arguments": {"type": ["string", "null"]},
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
        },
        "required": ["type", "call_id", "name", "arguments"],
    },
    {
        "type": "object",
        "properties": {"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _TEXT},
        "required": ["type", "call_id", "output"],
    },
    {"type": "object", "properties": {"type": {"const": "reasoning"}}, "required": ["type"]},
    {
        "type": "object",
        "properties": {"type": {"const": "item_reference"}, "id": {"type": "string", "minLength": 1, "maxLength": 128}},
        "required": ["type", "id"],
    },
]
INPUT_SCHEMA = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _ITEMS}, "minItems": 1}]}


def _content(value: object, info: ValidationInfo) -> str:
    return said_text(value, info.data.get("role"))


class InputMessage(Strict):
    """A message of the client, or one of an earlier response's output that comes back."""

    role: Annotated[str, BeforeValidator(check_role)]
    content: Annotated[str, BeforeValidator(_content)]


def _arguments(value: object) -> str:
    return "" if value is None else whole_text(value)


class FunctionCall(Strict):
    """From an earlier response's output. One that a limit has cut comes back with its status, and is passed over."""

    call_id: Annotated[Text, Field(min_length=1)]
    name: Text
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    arguments: Annotated[str, BeforeValidator(_arguments)]

    @cached_property
    def whole(self) -> bool:
        return self.status in (None, "completed") or parsed_arguments(self.arguments) is not None


def _output(value: object) -> str:
    return said_text(value, None)


class FunctionCallOutput(Strict):
    call_id: Annotated[Text, Field(min_length=1)]
    output: Annotated[str, BeforeValidator(_output)]


class Reasoning(Strict):
    """Of another server's answer, since none of this one has any. It is passed over: most templates know no reasoning,
    and the others leave out what was thought before the last question."""


class ItemReference(Strict):
    """An item of a kept response's output, by its id. `resolved` puts the item in its place."""

    id: Annotated[Text, Field(min_length=1, max_length=128)]


Item = InputMessage | FunctionCall | FunctionCallOutput | Reasoning | ItemReference
_KINDS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "item_reference": ItemReference,
}


def items_of(value: object) -> list[Item]:
    """A text is a message of the user. Raises ApiError that names the item and its field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        refuse("must be a string or a list of items")
    return [_item(item, f"input.{i}") for i, item in enumerate(value)]


def _item(value: object, param: str) -> Item:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None:
        # Of both kinds clients may leave out the type.
        kind = "item_reference" if isinstance(value, dict) and "id" in value and "role" not in value else "message"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        kinds = " or ".join(f"'{allowed}'" for allowed in _KINDS)
        raise bad_value(f"{param}.type", f"must be {kinds}: no other kind of item is supported by this server")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise first_error(error, param) from error


def resolved(items: Sequence[Item], texts: Sequence[str]) -> list[Item]:
    """`items` with those of `texts`, in JSON, in the place of references, as if they had been sent themselves."""
    waiting = iter(texts)
    return [
        _item(json.loads(next(waiting)), f"input.{i}") if isinstance(item, ItemReference) else item
        for i, item in enumerate(items)
    ]
