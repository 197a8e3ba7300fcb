"""A checked request becomes one turn of an engine. No HTTP in here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from engine_actor.messages import TurnRequest
from engine_actor.options import GrammarSpec, SamplingParams
from serve_app.ingress.errors import bad_value, context_length_exceeded
from serve_app.ingress.settings import IngressSettings
from serve_app.openai.identity import TurnIdentity, cache_scope_of
from serve_app.openai.protocol import GenerationRequest
from serve_app.text.calls import Calls
from serve_app.text.prompts import Prompt

# Below this a temperature only overflows; the most likely token is what it means.
_COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """One turn to run, of one key. `prompt_param` is the field to blame when the prompt is too long. `calls`: where
    in its answer those of tools may be."""

    request: TurnRequest
    tenant: str
    routing_key: str
    stops: tuple[str, ...]
    prompt_param: str
    calls: Calls = Calls.NOWHERE


def make_turn(
    body: GenerationRequest,
    prompt: Prompt,
    identity: TurnIdentity,
    sampling: SamplingParams,
    *,
    request_id: str,
    tenant: str,
    prompt_param: str,
    settings: IngressSettings,
    grammar: GrammarSpec | None,
    limit: int | None,
) -> PreparedTurn:
    """`limit`: the longest sequence, where it is known. Raises ApiError where the prompt can't be served: nothing in
    it, or no room for an answer."""
    length = len(prompt.ids)
    if length == 0:
        raise bad_value(prompt_param, "must not be empty")
    if limit is not None and length >= limit:
        raise context_length_exceeded(length, limit, prompt_param)
    longest = body.token_limit or settings.default_max_tokens or 0
    if limit is not None:
        room = limit - length
        longest = min(longest, room) if longest else room
    least = body.min_tokens or 0
    if longest and least > longest:
        raise bad_value("min_tokens", f"this answer can have at most {longest} tokens, not {least}")
    request = TurnRequest(
        request_id=request_id,
        cache_scope=cache_scope_of(tenant, body.cache_salt),
        session_id=identity.session_id,
        prompt_ids=prompt.ids,
        sampling=sampling,
        max_generated_tokens=longest,
        stop_token_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else prompt.ends),
        ignore_eos=bool(body.ignore_eos),
        spans=prompt.spans,
        min_generated_tokens=least,
        logprobs=body.likeliest,
        choices=body.choices,
        grammar=grammar,
    )
    return PreparedTurn(request, tenant, identity.routing_key, body.stop, prompt_param, body.calls)


def sampling_of(body: GenerationRequest, settings: IngressSettings) -> SamplingParams:
    """The request's own values, else the defaults; a seed is drawn where it names none."""
    defaults = settings.sampling
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return SamplingParams(
        temperature=0.0 if temperature < _COLDEST else temperature,
        top_k=max(top_k, 0),  # -1 is another word for no limit
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        seed=seed % 2**64,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        logit_bias=body.logit_bias,
        no_repeat_ngram_size=(
            defaults.no_repeat_ngram_size if body.no_repeat_ngram_size is None else body.no_repeat_ngram_size
        ),
    )
