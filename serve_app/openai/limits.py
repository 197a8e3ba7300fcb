"""What a request may ask for beyond its types: counts that the settings bound, ids that the model has, and values that
only make sense together. All raise ApiError 400 that names the field."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.ingress.errors import bad_value, not_served
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.protocol import ChatRequest, CompletingRequest, CompletionRequest, GenerationRequest


def check_generation(body: GenerationRequest, settings: IngressSettings, vocab_size: int) -> None:
    """For every request for an answer. `vocab_size`: ids that have a token are all below it."""
    if len(body.stop) > settings.max_stop_strings:
        raise bad_value("stop", f"at most {settings.max_stop_strings} stop strings are allowed")
    if any(len(stop) > settings.max_stop_length for stop in body.stop):
        raise bad_value("stop", f"a stop string may have at most {settings.max_stop_length} characters")
    if len(body.stop_token_ids) > settings.max_stop_token_ids:
        raise bad_value("stop_token_ids", f"at most {settings.max_stop_token_ids} ids are allowed")
    if len(body.logit_bias) > settings.max_logit_biases:
        raise bad_value("logit_bias", f"at most {settings.max_logit_biases} biases are allowed")
    check_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids((token for token, _ in body.logit_bias), vocab_size, "logit_bias")


def check_completing(body: CompletingRequest, settings: IngressSettings) -> None:
    """For chat and completions."""
    if body.stream_options is not None and not body.stream:
        raise bad_value("stream_options", "is only for a request with stream: true")
    if body.choices > settings.max_choices:
        raise bad_value("n", f"at most {settings.max_choices} choices are allowed")
    if body.best_of is not None and body.best_of != body.choices:
        raise bad_value("best_of", "is served only where it is equal to n")
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise bad_value("top_logprobs", "is only for a request with logprobs: true")
        _check_likeliest(body.top_logprobs, settings, "top_logprobs")
    elif isinstance(body, CompletionRequest):
        _check_likeliest(body.logprobs, settings, "logprobs")
        if body.echo and body.logprobs is not None:
            # The prompt's tokens would need logprobs of their own.
            raise not_served("echo", ", or leave logprobs out")


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    if any(not 0 <= token < vocab_size for token in ids):
        raise bad_value(param, f"a token id must be from 0 to {vocab_size - 1}")


def _check_likeliest(count: int | None, settings: IngressSettings, param: str) -> None:
    if count is not None and count > settings.max_top_logprobs:
        raise bad_value(param, f"at most {settings.max_top_logprobs} are named for each place")
