"""What reading a request gives: its turns, ready for an engine, and how their answer is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers

from serve_app.openai.desk import Desk
from serve_app.openai.formats import AnswerFormat
from serve_app.openai.grammars import answer_grammar
from serve_app.openai.identity import TurnIdentity, cache_scope_of, identify
from serve_app.openai.protocol import GenerationRequest
from serve_app.openai.turn_request import PreparedTurn, make_turn, sampling_of
from serve_app.text.prompts import Prompt
from serve_app.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a turn is made of besides the body. `limit`: the longest sequence, where it is known."""

    request_id: str
    tenant: str
    headers: Headers
    limit: int | None


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """One prompt of a request. `param` is the field to blame, `opening` what a conversation starts with."""

    prompt: Prompt
    param: str
    opening: Sequence[object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, read: its turns, and how their answer is written, given the spelling of tokens.

    session   hash of the session, for the log
    left_out  fields of the tools that the grammar does not keep to
    choices   answers to each prompt
    """

    turns: tuple[PreparedTurn, ...]
    writes: Callable[[TokenBytes], AnswerFormat]
    choices: int
    stream: bool
    session: str | None
    left_out: tuple[str, ...]


def prepared(
    desk: Desk,
    body: GenerationRequest,
    circumstances: Circumstances,
    turns: Sequence[tuple[RequestPrompt, TurnIdentity]],
    writes: Callable[[TokenBytes], AnswerFormat],
) -> Prepared:
    """Raises ApiError for a grammar or a prompt that can't be served."""
    grammar = answer_grammar(body, desk.settings)
    prepared_turns = [
        make_turn(
            body,
            part.prompt,
            identity,
            sampling_of(body, desk.settings),
            request_id=circumstances.request_id,
            tenant=circumstances.tenant,
            prompt_param=part.param,
            settings=desk.settings,
            grammar=None if grammar is None else grammar.grammar,
            limit=circumstances.limit,
        )
        for part, identity in turns
    ]
    named = next((identity for _, identity in turns if identity.session_id is not None), None)
    session = None if named is None else named.routing_key[:12]
    left_out = () if grammar is None else grammar.left_out
    return Prepared(tuple(prepared_turns), writes, body.choices, bool(body.stream), session, left_out)


def identity_of(
    desk: Desk,
    body: GenerationRequest,
    circumstances: Circumstances,
    opening: Sequence[object],
    chain: str | None = None,
) -> TurnIdentity:
    """See `identify`."""
    cache_scope = cache_scope_of(circumstances.tenant, body.cache_salt)
    return identify(circumstances.headers, body.session_id, body.user, opening, cache_scope, desk.settings, chain)
