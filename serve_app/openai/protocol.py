"""The bodies of requests: strict models of what is served.

A number is never taken from a string or a boolean, and must be finite and in range. Null means absent, as
everywhere in this API. Names that are not here are ignored, as the peers do; names of things that exist but
are not supported are in `unserved`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from engine_actor.options import MAX_INT32
from serve_app.ingress.errors import bad_value
from serve_app.openai.strict import Strict, Text, checked_text, refuse, whole_text
from serve_app.openai.structured import Named, StructuredOutputs, WantedFormat, chosen_grammar
from serve_app.openai.tools import ChosenTool, Function, PastCall, Tool, ToolChoice
from serve_app.text.calls import Calls
from serve_app.text.chat_template import Message

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("text", "input_text", "output_text")  # chat's spelling and those of responses, both on either route

# What /openapi.json shows where a validator takes more than the type says.
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_REFUSAL = {
    "type": "object",
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
    "required": ["type", "refusal"],
}
SAID = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [TEXT_PART, _REFUSAL]}}]}
_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_CONTENT = {"anyOf": [*SAID["anyOf"], {"type": "null"}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_ONE_PROMPT: list[object] = [{"type": "string"}, _IDS]
_PROMPTS = {"anyOf": [*_ONE_PROMPT, {"type": "array", "items": {"anyOf": _ONE_PROMPT}, "minItems": 1}]}
_ROLE = {"type": "string", "enum": [*ROLES, "tool"]}
_BIASES = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
        {"type": "null"},
    ]
}
_TOKEN_IDS = {"anyOf": [_IDS, {"type": "null"}]}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


PlainPrompt = str | tuple[int, ...]
"""A text, or token ids."""


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        refuse("must be a string or a list of strings")
    stops = tuple(checked_text(stop, "each stop string") for stop in value)
    if "" in stops:
        refuse("a stop string must not be empty")
    return stops


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Token ids, which JSON writes as strings, and what is added to their logits."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        refuse("must be an object of token ids and numbers")
    for token, bias in value.items():
        if not isinstance(token, str) or not _TOKEN_ID.fullmatch(token):
            refuse("a key must be a token id")
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:  # NaN is not between any two numbers
            refuse(f"the bias of token {token} must be a number from -100 to 100")
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        refuse("must be a list of token ids")
    return tuple(value)


def _prompts(value: object) -> tuple[PlainPrompt, ...]:
    """One prompt, or a list of them."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    prompts: list[PlainPrompt] = []
    for i, one in enumerate(several):
        try:
            prompts.append(_prompt(one))
        except PydanticCustomError as error:
            raise bad_value(prompt_param(i, len(several)), error.message()) from error
    return tuple(prompts)


def prompt_param(index: int, count: int) -> str:
    """How an error names one of the prompts of a request; a list of one prompt is that prompt."""
    return "prompt" if count == 1 else f"prompt.{index}"


def _prompt(value: object) -> PlainPrompt:
    if isinstance(value, str):
        return whole_text(value)
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        refuse("must be a string or a list of token ids")
    return tuple(value)


def _content(value: object, info: ValidationInfo) -> str:
    """The text of a message: given whole, in parts, or (an assistant's only) not at all."""
    role = info.data.get("role")
    if value is None:
        if role != "assistant":
            refuse("is needed; only an assistant's message may go without")
        return ""
    return said_text(value, role)


def said_text(value: object, role: str | None) -> str:
    """A text that is given whole or in parts. An assistant's refusal is what it said, too."""
    if isinstance(value, list):
        kinds = (*TEXT_PARTS, "refusal") if role == "assistant" else TEXT_PARTS
        return "\n".join(_part(part, i, kinds) for i, part in enumerate(value))
    return whole_text(value) if isinstance(value, str) else refuse("must be a string or a list of text parts")


def _part(part: object, index: int, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        refuse(f"part {index} must be an object with type and text")
    kind = part.get("type")
    if kind not in kinds:
        refuse(f"part {index} must be of type {' or '.join(map(repr, kinds))}: this server takes text only")
    name = "refusal" if kind == "refusal" else "text"
    return checked_text(part.get(name), f"the {name} of part {index}")


def check_role(value: object) -> str:
    if not isinstance(value, str) or value not in ROLES:
        refuse(f"must be one of {', '.join(ROLES)}")
    return value


def _chat_role(value: object) -> str:
    if value == "tool":
        return "tool"
    if value == "function":
        refuse("must be 'tool': 'function' is its older name, which this server does not know")
    return check_role(value)


def _no_call(value: object) -> None:
    if value:
        refuse("is the older form of tool_calls, which this server does not know")


def _no_audio(value: object) -> None:
    if value is not None:
        refuse("is not supported by this server, which takes text only")


class ChatMessage(Strict):
    """`refusal`, beside or in place of an assistant's content, is what it said, too."""

    role: Annotated[str, BeforeValidator(_chat_role), WithJsonSchema(_ROLE)]
    content: Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT)] = Field(
        default=None, validate_default=True
    )
    tool_calls: Annotated[list[PastCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    function_call: Annotated[None, BeforeValidator(_no_call)] = None
    refusal: Text | None = None
    audio: Annotated[None, BeforeValidator(_no_audio)] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            refuse("only an assistant's message may have tool_calls")
        if self.refusal and self.role != "assistant":
            refuse("only an assistant's message may have a refusal")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            refuse("a tool's message needs tool_call_id, and no other has one")
        return self

    def as_message(self) -> Message:
        # Templates know `system`; `developer` is its newer name.
        text_and_refusal = "\n".join(text for text in (self.content, self.refusal) if text)
        message = Message(role="system" if self.role == "developer" else self.role, content=text_and_refusal)
        if self.tool_calls:
            message["tool_calls"] = [call.as_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class StreamOptions(Strict):
    include_usage: bool | None = None


class GenerationRequest(Strict):
    """What all requests for an answer have in common."""

    model: Text | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT32)
    # Twice what the API's document says: a validator that takes numbers for doubles finds no border to stumble over.
    seed: int | None = Field(default=None, ge=-(2**64), le=2**64 - 1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop), WithJsonSchema(_STRINGS)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(default=None, max_length=4096)
    session_id: Text | None = None
    cache_salt: Text | None = Field(default=None, max_length=4096)
    ignore_eos: bool | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=MAX_INT32)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases), WithJsonSchema(_BIASES)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_token_ids), WithJsonSchema(_TOKEN_IDS)] = ()
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT32)

    @property
    def choices(self) -> int:
        return 1

    @property
    def likeliest(self) -> int | None:
        """How many tokens to name for each place of the answer; None: no logprobs at all."""
        return None

    @property
    def token_limit(self) -> int | None:
        """Longest answer, in tokens; None: the client sets no limit."""
        return None

    @property
    def form(self) -> list[Named]:
        """What the client says of the form of its text. Raises ApiError."""
        return []

    @property
    def calls(self) -> Calls:
        """Where in the answer there may be calls of tools."""
        return Calls.NOWHERE


class CallingRequest(GenerationRequest, ABC):
    """What chat and responses have in common: an answer may call tools."""

    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @property
    @abstractmethod
    def functions(self) -> Sequence[Function]:
        """Those that the request describes."""

    @abstractmethod
    def param_of_function(self, index: int) -> str:
        """How an error names one of them."""

    @property
    def not_with_calls(self) -> dict[str, bool]:
        """Fields that can't stand beside functions that may be called, and whether they are given."""
        return {}

    @property
    def callable_functions(self) -> list[Function]:
        """Those that this answer may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, ChosenTool):
            return [function for function in self.functions if function.name == self.tool_choice.name]
        return list(self.functions)

    @property
    def calls(self) -> Calls:
        if not self.callable_functions:
            return Calls.NOWHERE
        return Calls.OR_TEXT if self.form else Calls.AFTER_TEXT


class CompletingRequest(GenerationRequest):
    """What chat and completions have in common."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    n: int | None = Field(default=None, ge=1, le=MAX_INT32)
    best_of: int | None = Field(default=None, ge=1, le=MAX_INT32)
    response_format: WantedFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def form(self) -> list[Named]:
        return chosen_grammar(self.response_format, self.structured_outputs)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(CallingRequest, CompletingRequest):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_INT32)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None

    @property
    def functions(self) -> Sequence[Function]:
        return [tool.function for tool in self.tools or ()]

    def param_of_function(self, index: int) -> str:
        return f"tools.{index}.function"

    @property
    def not_with_calls(self) -> dict[str, bool]:
        return {
            "structured_outputs": self.structured_outputs is not None,
            "logprobs": bool(self.logprobs),
        }

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(CompletingRequest):
    prompt: Annotated[tuple[PlainPrompt, ...], BeforeValidator(_prompts), WithJsonSchema(_PROMPTS)]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_INT32)
    echo: bool | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs
