"""Tools that an answer may call: what a request says of them, and the grammar that keeps calls in form.

Every call has the name of a tool and arguments that its parameters allow, since nothing else can be chosen. Whether to
call at all is the model's own choice unless `tool_choice` takes it: until it begins a call, its text is free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from engine_actor.options import GrammarKind, GrammarSpec
from serve_app.openai.strict import Strict, Text, checked_text, refuse, whole_text
from serve_app.openai.wording import shown
from serve_app.text.calls import CLOSING, OPENING
from serve_app.text.chat_template import ToolCall, WrittenArguments

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


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """None: they are no JSON object, as where a limit has cut a call, or hold what can't be in a prompt."""
    try:
        parsed = json.loads(text, parse_constant=_no_number)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def past_arguments(value: object) -> dict[str, Any] | WrittenArguments:
    """Of a call that comes back in a conversation. It was made, whatever it looks like: by a model that wrote no
    object, or up to where a limit cut it. So no text is refused but one that can't be in a prompt."""
    text = checked_text("" if value is None else value, "it")
    if text.strip() in ("", "null"):
        return {}
    parsed = parsed_arguments(text)
    return WrittenArguments(text) if parsed is None else parsed


Name = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _tool_type(value: object) -> str:
    kind = whole_text(value)
    if kind != "function":
        refuse(f"a tool of type {shown(kind)} is not supported by this server: the only type is 'function'")
    return kind


class _Typed(Strict):
    """Comes first, so that of another type of tool nothing is asked but its type."""

    type: Annotated[Literal["function"], BeforeValidator(_tool_type)]


class Function(Strict):
    """`strict`: all of the schema must be what can be kept to. Else the rest is left out."""

    name: Name
    description: Text | None = None
    parameters: Annotated[
        dict[str, Any] | None, BeforeValidator(_parameters), WithJsonSchema({"type": ["object", "null"]})
    ] = None
    strict: bool | None = None

    @property
    def schema_text(self) -> str:
        schema = _NO_ARGUMENTS if self.parameters is None else {"type": "object"} | self.parameters
        return json.dumps(schema, ensure_ascii=False)

    def described(self) -> dict[str, object]:
        """What the prompt says of it."""
        fields = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": fields}


class Tool(_Typed):
    function: Function


class FlatTool(Function, _Typed):
    """As /v1/responses has it."""

    def shown(self) -> dict[str, object]:
        """As the response says it again."""
        return self.model_dump()


@dataclass(frozen=True, slots=True)
class ChosenTool:
    name: str


def _choice(value: object) -> str | ChosenTool | None:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return _chosen(value, name, '{"type": "function", "function": {"name": ...}}')


def _flat_choice(value: object) -> str | ChosenTool | None:
    name = value.get("name") if isinstance(value, dict) else None
    return _chosen(value, name, '{"type": "function", "name": ...}')


def _chosen(value: object, name: object, form: str) -> str | ChosenTool | None:
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(name, str):
        return ChosenTool(name)
    refuse(f"must be 'none', 'auto', 'required', or an object that names a function: {form}")


def shown_choice(choice: str | ChosenTool | None) -> str | dict[str, object]:
    """As a response says it again."""
    if isinstance(choice, ChosenTool):
        return {"type": "function", "name": choice.name}
    return choice or "auto"


_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
ToolChoice = Annotated[str | ChosenTool | None, PlainValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)]
FlatToolChoice = Annotated[str | ChosenTool | None, PlainValidator(_flat_choice), WithJsonSchema(_CHOICE_SCHEMA)]


class _PastFunction(Strict):
    name: Text
    arguments: Annotated[
        dict[str, Any] | WrittenArguments, PlainValidator(past_arguments), WithJsonSchema({"type": ["string", "null"]})
    ] = Field(default=None, validate_default=True)


class PastCall(Strict):
    """A call in a message of the assistant."""

    id: Text
    type: Literal["function"] = "function"
    function: _PastFunction

    def as_call(self) -> ToolCall:
        function = self.function
        return {"id": self.id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}


def calling_grammar(
    schemas: Mapping[str, str], *, must: bool, several: bool, text_schema: str | None = None
) -> GrammarSpec:
    """`schemas`: of the arguments, by the function's name. `must`: the answer is a call, or several. Else it is any
    text, and calls at its end if there are any; or, with `text_schema`, JSON of this schema or calls. All schemas have
    the options that make our style."""
    calls = " | ".join(f"{_quoted(_head(name))} %json {schema} {_quoted(CLOSING)}" for name, schema in schemas.items())
    more = f"({_quoted(chr(10) + OPENING)} call)*" if several else ""
    if must or text_schema is not None:
        text = "" if must or text_schema is None else f" | %json {text_schema}"
        grammar = f"start: {_quoted(OPENING)} call {more}{text}\ncall: {calls}\n"
        return GrammarSpec(GrammarKind.LARK, grammar, writes_json=True)
    text = f"begun[lazy]: TEXT {_quoted(OPENING)}\nTEXT: /(.|\\n)*/\n"
    grammar = f"start: TEXT | begun call {more}\ncall: {calls}\n{text}"
    return GrammarSpec(GrammarKind.LARK, grammar, trigger=OPENING, writes_json=True)


def _head(name: str) -> str:
    return f'\n{{"name": {_quoted(name)}, "arguments": '


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
