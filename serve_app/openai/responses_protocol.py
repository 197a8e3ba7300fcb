"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from engine_actor.options import MAX_INT32
from serve_app.openai.protocol import ROLES, GenerationRequest, check_role, joined_text
from serve_app.openai.strict import Strict, Text, refuse
from serve_app.openai.structured import Named, WantedText

_PARTS = {"user": ("input_text",), "assistant": ("output_text", "input_text")}
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512

_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}
_ITEM_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"type": "string", "enum": list(ROLES)},
        "content": _CONTENT_SCHEMA,
    },
    "required": ["role", "content"],
}
_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM_SCHEMA, "minItems": 1}]}


def _kind(value: object) -> str:
    if value != "message":
        refuse("must be 'message': no other kind of item is supported by this server")
    return "message"


def _content(value: object, info: ValidationInfo) -> str:
    return joined_text(value, _PARTS.get(info.data.get("role", ""), _PARTS["user"]))


class InputMessage(Strict):
    """A message of the client, or an output item of an earlier response that comes back."""

    type: Annotated[str, BeforeValidator(_kind)] = "message"
    role: Annotated[str, BeforeValidator(check_role)]
    content: Annotated[str, BeforeValidator(_content)]


def _input(value: object) -> object:
    """A text is a message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        refuse("must be a string or a list of messages")
    return value


def _metadata(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > _MAX_METADATA:
            refuse(f"may have at most {_MAX_METADATA} entries")
        if any(len(key) > _MAX_METADATA_KEY for key in value):
            refuse(f"a key may have at most {_MAX_METADATA_KEY} characters")
        if any(isinstance(text, str) and len(text) > _MAX_METADATA_VALUE for text in value.values()):
            refuse(f"a value may have at most {_MAX_METADATA_VALUE} characters")
    return value


class ResponsesRequest(GenerationRequest):
    input: Annotated[list[InputMessage], Field(min_length=1), BeforeValidator(_input), WithJsonSchema(_INPUT_SCHEMA)]
    instructions: Text | None = None
    previous_response_id: Text | None = Field(default=None, min_length=1, max_length=128)
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    text: WantedText | None = None
    metadata: Annotated[dict[Text, Text] | None, BeforeValidator(_metadata)] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def grammars(self) -> list[Named]:
        return [] if self.text is None or self.text.named is None else [self.text.named]

    @property
    def stored(self) -> bool:
        return self.store is not False
