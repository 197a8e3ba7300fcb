"""Tools in the prompt of a model whose chat template knows none: everything is said in plain messages.

The tools stand in the system message, calls in the text of the assistant, and results in a message of the user. Small
models and models without training for it can then use tools, too; a grammar keeps their calls in form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from serve_app.text.calls import written_call
from serve_app.text.chat_template import Message

_INTRODUCTION = (
    "You can call functions to help the user. Here they are, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, end your answer with its name and its arguments, and with nothing after it. "
    "A call of {name} looks like this:\n"
    "{example}"
)
_EXAMPLES: dict[object, object] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}


def spelled_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], *, system: bool = True
) -> list[Message]:
    """The same conversation, with roles and texts alone. Tools are introduced in the system message; without `system`,
    which a template may not know, in the first one of the user."""
    plain: list[Message] = []
    before = ""
    for message in messages:
        is_result = message["role"] == "tool"
        content = f"<tool_response>\n{message['content']}\n</tool_response>" if is_result else _with_calls(message)
        if before == "tool" and message["role"] in ("tool", "user"):
            # One message for all of them: many templates want user and assistant in turn.
            plain[-1] = Message(role="user", content=f"{plain[-1]['content']}\n{content}")
        else:
            plain.append(Message(role="user" if is_result else message["role"], content=content))
        before = message["role"]
    if not tools:
        return plain
    introduction = _introduction(tools)
    if plain and plain[0]["role"] == "system":
        first = f"{plain[0]['content']}\n\n{introduction}"
        return [Message(role="system", content=first), *plain[1:]]
    if not system and plain and plain[0]["role"] == "user":
        return [Message(role="user", content=f"{introduction}\n\n{plain[0]['content']}"), *plain[1:]]
    return [Message(role="system", content=introduction), *plain]


def _introduction(tools: Sequence[Mapping[str, object]]) -> str:
    """The example is a call of the first tool, with its own names: a small model copies what it sees."""
    functions = [cast("Mapping[str, Any]", tool["function"]) for tool in tools]
    described = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    name, schema = functions[0]["name"], functions[0].get("parameters")
    fill = {"{tools}": described, "{name}": name, "{example}": written_call(name, example_arguments(schema))}
    return re.sub("|".join(map(re.escape, fill)), lambda match: fill[match[0]], _INTRODUCTION)


def example_arguments(schema: object) -> dict[str, object]:
    """One value for each argument that the schema needs, or for the first one where it needs none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(properties, Mapping) or not properties:
        return {}
    needed = schema.get("required")
    names = [name for name in properties if isinstance(needed, Sequence) and name in needed] or list(properties)[:1]
    return {name: _example(properties[name]) for name in names}


def _example(schema: object) -> object:
    if not isinstance(schema, Mapping):
        return "..."
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), Sequence) and schema[key]:
            return schema[key][0]
    kind = schema.get("type")
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        kind = kind[0] if kind else None
    return example_arguments(schema) if kind == "object" else _EXAMPLES.get(kind, "...")


def _with_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [written_call(function["name"], function["arguments"]) for function in calls]
    return "\n".join(part for part in (message["content"], *written) if part)
