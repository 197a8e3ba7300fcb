"""Requests in a wanted state, and what a caller can see of them."""

from __future__ import annotations

from engine_actor.core.engine import Engine
from engine_actor.options import TurnOptions
from engine_actor.requests.events import EngineEvent
from engine_actor.requests.record import RequestStatus, Usage
from engine_actor.requests.request import Request
from tests.support.doubles import P10

STATES = list(RequestStatus)


def request_in(engine: Engine, state: RequestStatus) -> Request:
    """A request of one turn in the wanted state; a running turn has id 1."""
    request = engine.create_request()
    if state is RequestStatus.NEW:
        return request
    request.begin_turn(P10, TurnOptions(max_generated_tokens=1 if state is RequestStatus.IDLE else 9))
    if state in (RequestStatus.RUNNING, RequestStatus.IDLE):
        engine.run(8)
    if state is RequestStatus.CLOSED:
        request.close()
    assert request.status is state
    return request


def visible(request: Request) -> tuple[object, ...]:
    return (
        request.status,
        request.tokens,
        request.num_computed_tokens,
        request.turn_id,
        request.finish_reason,
        request.usage,
    )


def usage_of(event: EngineEvent) -> Usage:
    """The usage that the end of a turn reports."""
    assert event.usage is not None
    return event.usage


def free_blocks(engine: Engine) -> int:
    return engine.stats()["blocks_free"]
