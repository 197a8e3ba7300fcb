"""An EngineActor over the synthetic decoder, and readers of its streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_actor.actor.actor import EngineActor
from engine_actor.decoding.load import LoadedDecoder
from engine_actor.messages import HistorySpan, TurnAccepted, TurnEnded, TurnRefused, TurnRequest, TurnTokens
from engine_actor.options import SamplingParams
from engine_actor.sampling.vocabulary import Vocabulary
from tests.support.doubles import SyntheticDecoder
from tests.support.engines import actor_options

BLOCK_SIZE = 4


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    accepted: TurnAccepted | None = None
    ended: TurnEnded | None = None
    refused: TurnRefused | None = None


async def start_actor(
    decoder: SyntheticDecoder,
    blocks: int = 64,
    detokenize: Callable[[Any], str] | None = None,
    *,
    vocabulary: Callable[[], Vocabulary] | None = None,
    **options: Any,
) -> EngineActor:
    options.setdefault("kv_memory", float(blocks * decoder.manifest.paged.block_bytes(BLOCK_SIZE)))
    actor = EngineActor(
        actor_options("synthetic", block_size=BLOCK_SIZE, **options),
        "replica-1",
        detokenize,
        lambda _options, _progress: LoadedDecoder(decoder, 2**40),
        vocabulary=vocabulary,
    )
    await actor.start()
    return actor


def turn(
    prompt: list[int],
    limit: int = 8,
    session: str | None = None,
    cache_scope: str = "public",
    spans: tuple[HistorySpan, ...] = (),
    **sampling: Any,
) -> TurnRequest:
    return TurnRequest("test", cache_scope, session, tuple(prompt), SamplingParams(**sampling), limit, spans=spans)


async def ask(actor: EngineActor, request: TurnRequest) -> Answer:
    answer = Answer()
    async for delta in actor.stream_turn(request):
        match delta:
            case TurnAccepted():
                answer.accepted = delta
            case TurnTokens():
                answer.tokens += delta.token_ids
            case TurnEnded():
                answer.ended = delta
            case TurnRefused():
                answer.refused = delta
    return answer
