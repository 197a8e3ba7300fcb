"""Tools in the prompt of a model whose chat template knows none: everything is said in plain messages.

The tools stand in the system message, calls in the text of the assistant, and results in a message of the user. Small
models and models without training for it can then use tools, too; a grammar keeps their calls in form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from serve_app.text.calls import written_call
from serve_app.text.chat_template import Message

_INTRODUCTION = (
    "You can call functions to help the user. Here they are, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, end your answer with its name and its arguments, in this form and with nothing after it:\n"
    "<tool_call>\n"
    '{"name": "the function\'s name", "arguments": {"an argument\'s name": "its value"}}\n'
    "</tool_call>"
)


def spelled_out(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[Message]:
    """The same conversation, with roles and texts alone."""
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
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.replace("{tools}", described)
    if plain and plain[0]["role"] == "system":
        first = f"{plain[0]['content']}\n\n{introduction}"
        return [Message(role="system", content=first), *plain[1:]]
    return [Message(role="system", content=introduction), *plain]


def _with_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [written_call(function["name"], function["arguments"]) for function in calls]
    return "\n".join(part for part in (message["content"], *written) if part)
