"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine_actor.options import MAX_INT32
from serve_app.openai.protocol import CallingRequest
from serve_app.openai.responses.items import INPUT_SCHEMA, Item, items_of
from serve_app.openai.strict import Strict, Text, refuse
from serve_app.openai.structured import Named, WantedText
from serve_app.openai.tools import FlatTool, FlatToolChoice, Function

_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512


_METADATA_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"maxLength": _MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": _MAX_METADATA_VALUE},
            "maxProperties": _MAX_METADATA,
        },
        {"type": "null"},
    ]
}


def _metadata(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > _MAX_METADATA:
            refuse(f"may have at most {_MAX_METADATA} entries")
        if any(len(key) > _MAX_METADATA_KEY for key in value):
            refuse(f"a key may have at most {_MAX_METADATA_KEY} characters")
        if any(isinstance(text, str) and len(text) > _MAX_METADATA_VALUE for text in value.values()):
            refuse(f"a value may have at most {_MAX_METADATA_VALUE} characters")
    return value


# What a response shows more of only where it has some of it. This server's have none, so nothing is left out.
_Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class WantedReasoning(Strict):
    """The efforts that may stand here are in `unserved`. Of no reasoning any summary is the same: none."""

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None

    def shown(self) -> dict[str, object]:
        """As the response says it again."""
        return self.model_dump()


class ResponsesRequest(CallingRequest):
    """`max_tool_calls`: of tools that a server runs itself. This one has none, so none is ever too many."""

    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(items_of), WithJsonSchema(INPUT_SCHEMA)]
    instructions: Text | None = None
    previous_response_id: Text | None = Field(default=None, min_length=1, max_length=128)
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    text: WantedText | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] | None = None
    tool_choice: FlatToolChoice = None
    max_tool_calls: int | None = Field(default=None, ge=1, le=MAX_INT32)
    reasoning: WantedReasoning | None = None
    include: Annotated[list[_Include], Field(fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Text, Text] | None, BeforeValidator(_metadata), WithJsonSchema(_METADATA_SCHEMA)] = None

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
    def blamed_for_length(self) -> str:
        """The field that an error names where the prompt is too long: "auto" would have had it shortened."""
        return "truncation" if self.truncation == "auto" else "input"

    @property
    def stored(self) -> bool:
        return self.store is not False
