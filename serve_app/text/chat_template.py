"""Messages to prompt text by the model's own chat template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, NotRequired, TypedDict, cast

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.text.calls import OPENING
from serve_app.text.control_tokens import SHIELD
from serve_app.text.errors import ChatTemplateError
from serve_app.text.generation_tag import GenerationTag

# What a template raises, by itself or by what it does to the values that it is given.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


_PROBE = "\ue000probe\ue001"


class WrittenArguments(str):
    """Arguments of a past call that are no JSON object, such as those that a limit has cut: they stand in the prompt as
    the text that they are, also where a template writes them as JSON."""

    __slots__ = ()


class CalledFunction(TypedDict):
    name: str
    arguments: Mapping[str, Any] | WrittenArguments


class ToolCall(TypedDict):
    id: str
    type: str
    function: CalledFunction


class Message(TypedDict):
    """As templates see it. `content` is always text: parts are joined and null is empty before this point."""

    role: str
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]


class ChatTemplate:
    """A compiled template. `render` has no state and can run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ChatTemplateError if the source is no template."""
        # Templates are written for these settings, filters and globals: they are part of the format.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"The model's chat template can't be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        # The form of calls that this server reads (`calls.py`), which is that of Qwen, Hermes and others.
        self.knows_tools = "tools" in source and OPENING in source
        # Qwen's switch. Such a model writes down its thoughts first unless it is off, and here nobody turns it off.
        self.thinks = "enable_thinking" in source

    @cached_property
    def knows_system(self) -> bool:
        """Whether a system message has its place; some templates refuse it, or leave it out."""
        try:
            return _PROBE in self.render([Message(role="system", content=_PROBE), Message(role="user", content="x")])
        except ChatTemplateError:
            return False

    @cached_property
    def after_answer(self) -> str:
        """What follows an answer in a prompt; empty where that can't be told."""
        messages = [Message(role="user", content="x"), Message(role="assistant", content=_PROBE)]
        try:
            return self.render([*messages, Message(role="user", content="x")]).partition(_PROBE)[2]
        except ChatTemplateError:
            return ""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """The prompt, up to where the assistant's answer begins. Raises ChatTemplateError."""
        variables = {"tools": list(tools)} if tools else {}
        try:
            return self._rendered(messages, variables)
        except _REFUSALS as error:
            # Some templates go through the arguments one by one, so those that are a text get a name.
            named = [_with_named_arguments(message) for message in messages]
            if named != list(messages):
                try:
                    return self._rendered(named, variables)
                except _REFUSALS:
                    pass  # the first refusal says more
            raise ChatTemplateError(f"The chat template refused these messages: {error}") from error

    def _rendered(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        return self._template.render(messages=messages, add_generation_prompt=True, **variables, **self._special_tokens)


def _with_named_arguments(message: Message) -> Message:
    calls = [
        ToolCall(id=call["id"], type=call["type"], function=_named(call["function"]))
        for call in message.get("tool_calls", ())
    ]
    return cast(Message, {**message, "tool_calls": calls}) if calls else message


def _named(function: CalledFunction) -> CalledFunction:
    arguments = function["arguments"]
    if isinstance(arguments, WrittenArguments):
        return CalledFunction(name=function["name"], arguments={"arguments": str(arguments)})
    return function


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which would be wrong in a prompt. Shields stay what they are."""
    if isinstance(value, WrittenArguments):
        return str(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
    return text.replace(f"\\u{ord(SHIELD):04x}", SHIELD) if ensure_ascii else text
