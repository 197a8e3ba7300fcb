"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine_actor.options import MAX_INT32
from serve_app.openai.protocol import CallingRequest
from serve_app.openai.responses.items import INPUT_SCHEMA, Item, items_of
from serve_app.openai.strict import Text, refuse
from serve_app.openai.structured import Named, WantedText
from serve_app.openai.tools import FlatTool, FlatToolChoice, Function

_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512


def _metadata(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > _MAX_METADATA:
            refuse(f"may have at most {_MAX_METADATA} entries")
        if any(len(key) > _MAX_METADATA_KEY for key in value):
            refuse(f"a key may have at most {_MAX_METADATA_KEY} characters")
        if any(isinstance(text, str) and len(text) > _MAX_METADATA_VALUE for text in value.values()):
            refuse(f"a value may have at most {_MAX_METADATA_VALUE} characters")
    return value


class ResponsesRequest(CallingRequest):
    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(items_of), WithJsonSchema(INPUT_SCHEMA)]
    instructions: Text | None = None
    previous_response_id: Text | None = Field(default=None, min_length=1, max_length=128)
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    text: WantedText | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] | None = None
    tool_choice: FlatToolChoice = None
    metadata: Annotated[dict[Text, Text] | None, BeforeValidator(_metadata)] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def form(self) -> list[Named]:
        return [] if self.text is None or self.text.named is None else [self.text.named]

    @property
    def functions(self) -> Sequence[Function]:
        return self.tools or ()

    def param_of_function(self, index: int) -> str:
        return f"tools.{index}"

    @property
    def stored(self) -> bool:
        return self.store is not False
