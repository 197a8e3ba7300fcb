"""Messages to prompt text by the model's own chat template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, NotRequired, TypedDict

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.text.calls import OPENING
from serve_app.text.control_tokens import SHIELD
from serve_app.text.errors import ChatTemplateError, TokenizerError


class CalledFunction(TypedDict):
    name: str
    arguments: Mapping[str, Any]


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
        """Raises TokenizerError if the source is no template."""
        # Templates are written for these settings, filters and globals: they are part of the format.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template can't be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        # The form of calls that this server reads (`calls.py`), which is that of Qwen, Hermes and others.
        self.knows_tools = "tools" in source and OPENING in source

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """The prompt, up to where the assistant's answer begins. Raises ChatTemplateError."""
        given = {"tools": list(tools)} if tools else {}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **given, **self._special_tokens)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ChatTemplateError(f"The chat template refused these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which would be wrong in a prompt. Shields stay what they are."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
    return text.replace(f"\\u{ord(SHIELD):04x}", SHIELD) if ensure_ascii else text
