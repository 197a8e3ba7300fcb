"""From the body of a response and the conversation that it goes on from to its turn. See `desk`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from serve_app.dated_ids import new_id
from serve_app.ingress.body import json_object
from serve_app.ingress.errors import bad_value
from serve_app.openai.chat import chat_prompt, conversation_opening
from serve_app.openai.desk import Desk
from serve_app.openai.limits import check_generation, check_lengths
from serve_app.openai.prepared import Circumstances, Prepared, RequestPrompt, identity_of, prepared
from serve_app.openai.requests import checked_model
from serve_app.openai.responses.conversation import as_message, check_calls, messages_of
from serve_app.openai.responses.format import ResponseFormat
from serve_app.openai.responses.items import ItemReference, resolved
from serve_app.openai.responses.kept import Keeping
from serve_app.openai.responses.protocol import ResponsesRequest
from serve_app.openai.responses.store import FoundItems, History, KeptMessage
from serve_app.openai.strict import parse
from serve_app.openai.turn_request import sampling_of
from serve_app.openai.unserved import refuse_unserved_responses
from serve_app.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class KeptNeeded:
    """The body can be read only with what another process keeps: the conversation up to this response, and items.

    places   where in the input each of the items is referred to
    """

    previous_response_id: str | None
    item_ids: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a body refers to. `items`: as JSON, in the order of the input."""

    history: History | None
    items: FoundItems


@dataclass(frozen=True, slots=True)
class PreparedResponse(Prepared):
    """`keeping`: what is known of a response that is to be stored."""

    writes: Callable[[TokenBytes], ResponseFormat]
    keeping: Keeping | None


def parse_response(desk: Desk, data: bytes) -> ResponsesRequest:
    content = json_object(data)
    refuse_unserved_responses(content, thinks=desk.prompts.thinks)
    check_lengths(content, desk.settings)
    body = parse(ResponsesRequest, content)
    checked_model(body.model, desk.settings)
    check_generation(body, desk.settings, desk.vocab_size)
    return body


def prepare_response(
    desk: Desk, body: ResponsesRequest, circumstances: Circumstances, kept: Kept | None
) -> PreparedResponse | KeptNeeded:
    references = [(i, item.id) for i, item in enumerate(body.input) if isinstance(item, ItemReference)]
    if kept is None and (body.previous_response_id is not None or references):
        return KeptNeeded(body.previous_response_id, tuple(id for _, id in references), tuple(i for i, _ in references))
    history, items = (None, FoundItems()) if kept is None else (kept.history, kept.items)
    input_items = resolved(body.input, items.texts)
    model, settings = checked_model(body.model, desk.settings), desk.settings
    earlier = () if history is None else history.messages
    check_calls(earlier, input_items)
    own = messages_of(input_items)
    if not own:
        raise bad_value("input", "must have more than items of type 'reasoning', which are passed over")
    # Instructions are those of this turn alone: they stand first, and earlier ones are not carried over.
    first = () if body.instructions is None else (KeptMessage("system", body.instructions),)
    spoken = (*first, *earlier, *own)
    if len(spoken) > settings.max_messages:
        most, had = settings.max_messages, len(spoken)
        raise bad_value("input", f"at most {most} messages are allowed, earlier ones included, not {had}")
    messages = [as_message(kept) for kept in spoken]
    tools = [function.described() for function in body.functions]
    blamed = body.blamed_for_length
    prompt = chat_prompt(desk.prompts, messages, "input", circumstances.limit, tools, length_param=blamed)
    part = RequestPrompt(prompt, blamed, conversation_opening(messages))
    response_id = new_id("resp")
    # The first of a chain names the session of all. Items that are referred to are of the chain, too.
    session = history.session_id if history is not None else items.session_id
    chain = session if session is not None else response_id if body.stored else None
    identity = identity_of(desk, body, circumstances, [model, *part.opening], chain)
    sampling = sampling_of(body, settings)
    # What a response says of its request is all but the input, which may be long.
    shown = body.model_copy(update={"input": []})
    writes = partial(_format, shown, model, sampling.temperature, sampling.top_p, response_id)
    ready = prepared(desk, body, circumstances, [(part, identity)], writes)
    keeping = None
    if body.stored:
        assert identity.session_id is not None
        keeping = Keeping(circumstances.tenant, identity.session_id, own)
    return PreparedResponse(ready.turns, writes, ready.choices, ready.stream, ready.session, ready.left_out, keeping)


def _format(
    body: ResponsesRequest, model: str, temperature: float, top_p: float, response_id: str, spelling: TokenBytes
) -> ResponseFormat:
    return ResponseFormat(body, model, temperature, top_p, response_id)
