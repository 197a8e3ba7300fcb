"""What bodies may hold beyond the types of their fields, as a JSON schema says it: bounds that the operator chooses,
the ids that the model has, fields that need each other, and parameters that may only say "not used".

The models of bodies refuse all of this by themselves, with words of their own; here it is told beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.openai.desk import Desk
from serve_app.openai.limits import most_prompts
from serve_app.openai.protocol import TEXT_PART
from serve_app.openai.unserved import UNSERVED

Schema = dict[str, Any]

CAVEAT = (
    "A request that fits this schema is still refused with 400 where its fields contradict each other (stream_options "
    "without stream, top_logprobs without logprobs, best_of other than n, min_tokens above the longest answer, a "
    "tool_choice of no tool, two tools of one name, a call without its output, several prompts of one session, echo, "
    "logprobs, ignore_eos or min_tokens beside what excludes them), where the name of a session is not printable, "
    "where the prompt leaves no room for an answer, where the chat template refuses the messages, and where a grammar "
    "can't be kept to. A whole number is written without a fraction."
)
_NULL: Schema = {"type": "null"}
_FUNCTION: Schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def narrow(schema: Schema, kind: str, desk: Desk) -> None:
    """Changes the schema of a body in place. `kind`: a key of UNSERVED, or another name of a body that has none."""
    properties: Schema = schema["properties"]
    properties |= {name: schema_of_field for name, schema_of_field in _remade(kind, desk).items() if name in properties}
    for name, most in _largest(desk).items():
        for branch in _branches(properties, name, "integer"):
            branch["maximum"] = most
    for name, most in {"messages": desk.settings.max_messages, "tools": desk.settings.max_tools}.items():
        for branch in _branches(properties, name, "array"):
            branch["maxItems"] = most
    for branch in _branches(properties, "messages", "array"):
        branch["items"] = _message(branch["items"])
    for branch in _branches(properties, "tools", "array"):
        tool = branch["items"]["properties"]
        function = tool if kind == "responses" else tool["function"]["properties"]
        function["parameters"] = {"anyOf": [_NULL, {"type": "object", "properties": {"type": {"const": "object"}}}]}
    for branch in _branches(properties, "response_format", "object"):
        branch["anyOf"] = _schema_if_wanted("json_schema")
    for text in _branches(properties, "text", "object"):
        for branch in _branches(text["properties"], "format", "object"):
            branch["anyOf"] = _schema_if_wanted("schema")
    for branch in _branches(properties, "structured_outputs", "object"):
        branch["anyOf"] = _exactly_one(branch["properties"])
    for name, values in UNSERVED.get(kind, {}).items():
        outer, _, inner = name.partition(".")
        if not inner:
            properties[name] = {"enum": [None, *values]}
            continue
        properties.setdefault(outer, {"anyOf": [{"type": "object", "properties": {}}, _NULL]})
        for branch in _branches(properties, outer, "object"):
            branch["properties"][inner] = {"enum": [None, *values]}
    if kind == "tokenize":
        no_special = {"enum": [None, False]}
        schema["anyOf"] = [
            {"properties": {"prompt": {"type": "string"}, "messages": _NULL}, "required": ["prompt"]},
            {
                "properties": {"messages": {"type": "array"}, "prompt": _NULL, "add_special_tokens": no_special},
                "required": ["messages"],
            },
        ]


def _remade(kind: str, desk: Desk) -> dict[str, Schema]:
    """Fields that take several types, or names of what there is."""
    settings = desk.settings
    token: Schema = {"type": "integer", "minimum": 0, "maximum": desk.vocab_size - 1}
    tokens: Schema = {"type": "array", "items": token}
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": settings.max_stop_length}
    biases: Schema = {
        "type": "object",
        "propertyNames": {"pattern": f"^({numbers_below(desk.vocab_size)})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": settings.max_logit_biases,
    }
    session: Schema = {"type": "string", "minLength": 1, "maxLength": settings.max_session_id_length}
    function = _FUNCTION["properties"] if kind == "responses" else {"function": _FUNCTION}
    chosen: Schema = {
        "type": "object",
        "properties": {"type": {"const": "function"}, **function},
        "required": ["type", *function],
    }
    remade: dict[str, Schema] = {
        "model": {"enum": [None, *settings.model_ids]},
        "session_id": session if kind == "fork" else {"anyOf": [session, _NULL]},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": settings.max_stop_strings}, _NULL]},
        "stop_token_ids": {"anyOf": [tokens | {"maxItems": settings.max_stop_token_ids}, _NULL]},
        "logit_bias": {"anyOf": [biases, _NULL]},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, chosen, _NULL]},
        "tokens": tokens,
        "seed": {"anyOf": [{"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, _NULL]},
    }
    if kind == "completion":
        one: list[Schema] = [{"type": "string", "minLength": 1}, tokens | {"minItems": 1}]
        several = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": most_prompts(settings)}
        remade["prompt"] = {"anyOf": [*one, several]}
    return remade


def _largest(desk: Desk) -> dict[str, int]:
    settings = desk.settings
    logprobs = dict.fromkeys(("top_logprobs", "logprobs"), settings.max_top_logprobs)
    return logprobs | dict.fromkeys(("n", "best_of"), settings.max_choices)


def _branches(properties: Schema, name: str, kind: str) -> Iterator[Schema]:
    """The schemas of this type that a property has, if it is there."""
    schema = properties.get(name, {})
    yield from (branch for branch in schema.get("anyOf", [schema]) if branch.get("type") == kind)


def _message(schema: Schema) -> Schema:
    """What a message has depends on its role."""
    properties = schema["properties"]
    others: Schema = {
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]},
        "tool_calls": {"anyOf": [_NULL, {"type": "array", "maxItems": 0}]},
        "refusal": {"enum": [None, ""]},
    }

    def of(roles: list[str], needed: list[str], **own: Schema) -> Schema:
        return {
            "type": "object",
            "properties": properties | {"role": {"enum": roles}} | own,
            "required": ["role", *needed],
        }

    return {
        "anyOf": [
            of(["system", "developer", "user"], ["content"], **others, tool_call_id=_NULL),
            of(["assistant"], [], tool_call_id=_NULL),
            of(["tool"], ["content", "tool_call_id"], **others, tool_call_id={"type": "string"}),
        ]
    }


def _schema_if_wanted(name: str) -> list[Schema]:
    return [
        {"properties": {"type": {"enum": ["text", "json_object"]}}},
        {"properties": {name: {"type": "object"}}, "required": [name]},
    ]


def _exactly_one(properties: Schema) -> list[Schema]:
    """Null is as good as absent, and so is false."""
    absent: dict[str, Schema] = {name: {"not": {"enum": [None, False]}} for name in properties}
    none: dict[str, Schema] = {name: {"enum": [None, False]} for name in properties}
    return [{"properties": none | {name: absent[name]}, "required": [name]} for name in properties]


def numbers_below(bound: int) -> str:
    """A pattern of the decimal numbers from 0 to `bound` - 1 as JSON writes them."""
    last = str(bound - 1)
    patterns = ["0", *(f"[1-9][0-9]{{{more}}}" for more in range(len(last) - 1))]
    for place, digit in enumerate(last):
        least = 1 if place == 0 else 0
        if int(digit) > least:
            patterns.append(f"{last[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(last) - place - 1}}}")
    return "|".join([*patterns, last])
