"""Tools that an answer may call: what a request says of them, and the grammar that keeps calls in form.

Every call has the name of a tool and arguments that its parameters allow, since nothing else can be chosen. Whether to
call at all is the model's own choice unless `tool_choice` takes it: until it begins a call, its text is free.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from engine_actor.options import Guidance, GuidanceKind
from engine_actor.sampling.guidance import JSON_STYLE
from serve_app.openai.strict import Strict, Text, checked_text, refuse
from serve_app.text.calls import CLOSING, OPENING
from serve_app.text.chat_template import ToolCall

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _parameters(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        refuse("must be a JSON schema, which is an object")
    if value.get("type", "object") != "object":
        refuse("must be the schema of an object: its type must be 'object'")
    checked_text(json.dumps(value, ensure_ascii=False), "it")
    return value or None


def _arguments(value: object) -> dict[str, Any]:
    try:
        parsed = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        refuse("must be the text of a JSON object")
    checked_text(json.dumps(parsed, ensure_ascii=False), "it")
    return parsed


Name = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Strict):
    """`strict`: every word of the schema must be one that can be kept to. Else unknown ones are passed over."""

    name: Name
    description: Text | None = None
    parameters: Annotated[
        dict[str, Any] | None, BeforeValidator(_parameters), WithJsonSchema({"type": ["object", "null"]})
    ] = None
    strict: bool | None = None

    @property
    def schema_text(self) -> str:
        schema = _NO_ARGUMENTS if self.parameters is None else {"type": "object"} | self.parameters
        return json.dumps(schema | {"x-guidance": JSON_STYLE | {"lenient": not self.strict}}, ensure_ascii=False)


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def described(self) -> dict[str, object]:
        """What the prompt says of it."""
        given = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": given}


@dataclass(frozen=True, slots=True)
class ChosenTool:
    name: str


def _choice(value: object) -> str | ChosenTool | None:
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return ChosenTool(name)
    refuse(
        "must be 'none', 'auto', 'required', or an object that names a function: "
        '{"type": "function", "function": {"name": ...}}'
    )


_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
ToolChoice = Annotated[str | ChosenTool | None, PlainValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)]


class _PastFunction(Strict):
    name: Text
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments), WithJsonSchema({"type": "string"})]


class PastCall(Strict):
    """A call in a message of the assistant."""

    id: Text
    type: Literal["function"] = "function"
    function: _PastFunction

    def as_call(self) -> ToolCall:
        function = self.function
        return {"id": self.id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}


def calling_grammar(functions: Sequence[Function], *, must: bool, several: bool) -> Guidance:
    """`must`: the answer is a call, or several; else it is any text, and calls at its end if there are any."""
    calls = " | ".join(
        f"{_quoted(_head(function.name))} %json {function.schema_text} {_quoted(CLOSING)}" for function in functions
    )
    more = f"({_quoted(chr(10) + OPENING)} call)*" if several else ""
    if must:
        return Guidance(GuidanceKind.LARK, f"start: {_quoted(OPENING)} call {more}\ncall: {calls}\n")
    text = f"begun[lazy]: TEXT {_quoted(OPENING)}\nTEXT: /(.|\\n)*/\n"
    return Guidance(GuidanceKind.LARK, f"start: TEXT | begun call {more}\ncall: {calls}\n{text}", trigger=OPENING)


def _head(name: str) -> str:
    return f'\n{{"name": {_quoted(name)}, "arguments": '


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
