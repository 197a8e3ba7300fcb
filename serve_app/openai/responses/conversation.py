"""The conversation of a response: items become messages, and every output of a function has its call.

A call belongs to the assistant's message before it, as in chat, so that both give the same prompt. What OpenAI refuses
is refused here, too: an output without a call before it, and a call that is still without output when the next answer
is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from serve_app.ingress.errors import bad_value
from serve_app.openai.choices import Piece
from serve_app.openai.responses.items import FunctionCall, FunctionCallOutput, InputMessage, Item, Reasoning
from serve_app.openai.responses.store import KeptCall, KeptMessage
from serve_app.openai.tools import parsed_arguments, past_arguments
from serve_app.openai.wording import shown
from serve_app.text.chat_template import CalledFunction, Message, ToolCall


def messages_of(items: Sequence[Item]) -> tuple[KeptMessage, ...]:
    """Calls that were cut are left out, and so is reasoning."""
    messages: list[KeptMessage] = []
    spoken = (item for item in items if not isinstance(item, Reasoning))
    for are_calls, group in groupby(spoken, lambda item: isinstance(item, FunctionCall)):
        if not are_calls:
            messages += [_message(item) for item in group if isinstance(item, InputMessage | FunctionCallOutput)]
            continue
        if not messages or messages[-1].role != "assistant":
            messages.append(KeptMessage("assistant", ""))
        whole = (item for item in group if isinstance(item, FunctionCall) and item.whole)
        calls = tuple(KeptCall(call.call_id, call.name, call.arguments) for call in whole)
        messages[-1] = replace(messages[-1], calls=calls)
    return tuple(messages)


def _message(item: InputMessage | FunctionCallOutput) -> KeptMessage:
    if isinstance(item, FunctionCallOutput):
        return KeptMessage("tool", item.output, call_id=item.call_id)
    return KeptMessage(item.role, item.content)


def answer_of(answer: Piece) -> KeptMessage:
    """An answer as later turns have it. Calls that were cut are left out."""
    calls = (KeptCall(call.id, call.name, call.arguments) for call in answer.calls)
    whole = tuple(call for call in calls if parsed_arguments(call.arguments) is not None)
    return KeptMessage("assistant", answer.text, whole)


def as_message(kept: KeptMessage) -> Message:
    # Templates know `system`; `developer` is its newer name.
    message = Message(role="system" if kept.role == "developer" else kept.role, content=kept.text)
    if kept.calls:
        message["tool_calls"] = [_tool_call(call) for call in kept.calls]
    if kept.call_id is not None:
        message["tool_call_id"] = kept.call_id
    return message


def _tool_call(call: KeptCall) -> ToolCall:
    function = CalledFunction(name=call.name, arguments=past_arguments(call.arguments))
    return {"id": call.id, "type": "function", "function": function}


def check_calls(history: Sequence[KeptMessage], items: Sequence[Item]) -> None:
    """Raises ApiError 400 where `items`, after `history`, have an output without a call or a call without output."""
    calls = {call.id for message in history for call in message.calls}
    unanswered = dict.fromkeys(call.id for message in history for call in message.calls)
    for message in history:
        unanswered.pop(message.call_id or "", None)
    for i, item in enumerate(items):
        if isinstance(item, FunctionCall) and item.whole:
            if item.call_id in calls:
                raise bad_value(f"input.{i}.call_id", f"{shown(item.call_id)} is the id of an earlier call, too")
            calls.add(item.call_id)
            unanswered[item.call_id] = None
        elif isinstance(item, FunctionCallOutput):
            if item.call_id not in unanswered:
                why = "has an output already" if item.call_id in calls else "was not made before it"
                raise bad_value(f"input.{i}.call_id", f"the call {shown(item.call_id)} {why}")
            del unanswered[item.call_id]
    if unanswered:
        call_id = shown(next(iter(unanswered)))
        raise bad_value("input", f"the call {call_id} needs its output, an item of type 'function_call_output'")
