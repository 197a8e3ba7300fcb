"""What a request may ask for beyond its types: counts that the settings bound, ids that the model has, and values that
only make sense together. All raise ApiError 400 that names the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serve_app.ingress.errors import ApiError, bad_value, not_supported
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.protocol import (
    CallingRequest,
    ChatRequest,
    CompletingRequest,
    CompletionRequest,
    GenerationRequest,
)
from serve_app.openai.tools import ChosenTool
from serve_app.openai.wording import misfit
from serve_app.text.calls import Calls

_MAX_INCLUDE = 100  # more than there are


def check_lengths(content: Mapping[str, object], settings: IngressSettings) -> None:
    """For every body, before a model is made of it: a million items would each be checked."""
    bounds = {
        "messages": (settings.max_messages, "messages"),
        "input": (settings.max_messages, "items"),
        "tools": (settings.max_tools, "tools"),
        "include": (_MAX_INCLUDE, "values"),
        "stop": (settings.max_stop_strings, "stop strings"),
        "stop_token_ids": (settings.max_stop_token_ids, "ids"),
        "logit_bias": (settings.max_logit_biases, "biases"),
    }
    for name in bounds.keys() & content.keys():
        value, (most, things) = content[name], bounds[name]
        if isinstance(value, list | dict) and len(value) > most:
            raise too_many(name, len(value), most, things)
    prompt = content.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], str | list)
    if isinstance(prompt, list) and several and len(prompt) > most_prompts(settings):
        raise too_many("prompt", len(prompt), most_prompts(settings), "prompts")


def check_generation(body: GenerationRequest, settings: IngressSettings, vocab_size: int) -> None:
    """For every request for an answer. `vocab_size`: ids that have a token are all below it."""
    longest = max(map(len, body.stop), default=0)
    if longest > settings.max_stop_length:
        raise bad_value("stop", f"a stop string may have at most {settings.max_stop_length} characters, not {longest}")
    check_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids((token for token, _ in body.logit_bias), vocab_size, "logit_bias")
    if isinstance(body, CallingRequest):
        _check_tools(body)


def check_completing(body: CompletingRequest, settings: IngressSettings) -> None:
    """For chat and completions."""
    if body.stream_options is not None and not body.stream:
        raise bad_value("stream_options", "is only for a request with stream: true")
    if body.choices > settings.max_choices:
        raise misfit("n", f"must be at most {settings.max_choices}", body.choices)
    if body.best_of is not None and body.best_of != body.choices:
        raise misfit("best_of", f"must be equal to n, which is {body.choices}", body.best_of)
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise bad_value("top_logprobs", "is only for a request with logprobs: true")
        _check_likeliest(body.top_logprobs, settings, "top_logprobs")
    elif isinstance(body, CompletionRequest):
        _check_likeliest(body.logprobs, settings, "logprobs")
        if body.echo and body.logprobs is not None:
            # The prompt's tokens would need logprobs of their own.
            raise not_supported("echo", "remove it, or `logprobs`")


def _check_tools(body: CallingRequest) -> None:
    names = [function.name for function in body.functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_value(f"{body.param_of_function(i)}.name", f"'{name}' is the name of an earlier tool, too")
    chosen = body.tool_choice
    if isinstance(chosen, ChosenTool) and chosen.name not in names:
        raise bad_value("tool_choice", f"none of the tools is named '{chosen.name}'")
    if chosen == "required" and not names:
        raise bad_value("tool_choice", "no tools are given that a call could be of")
    if body.calls is not Calls.NOWHERE:
        for name, value in body.not_with_calls.items():
            if value:
                raise not_supported(name, "remove it, or `tools`, or set tool_choice to none")


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise misfit(param, f"must have token ids from 0 to {vocab_size - 1}", token)


def too_many(param: str, count: int, most: int, things: str) -> ApiError:
    return bad_value(param, f"at most {most} {things} are allowed, not {count}")


def most_prompts(settings: IngressSettings) -> int:
    """More than can be open at a time would be told to come back for ever."""
    most = min(settings.max_prompts, settings.max_turns)
    return most if settings.max_turns_per_key is None else min(most, settings.max_turns_per_key)


def _check_likeliest(count: int | None, settings: IngressSettings, param: str) -> None:
    if count is not None and count > settings.max_top_logprobs:
        raise misfit(param, f"must be at most {settings.max_top_logprobs}", count)
