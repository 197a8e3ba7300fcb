"""The engine as a library: one process, one thread, no server. The caller owns the loop; the engine's guide shows one.

What a request is created with are the defaults of its turns (C10): a turn's options say what differs. Tokens go in and
tokens come out; text is the caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from engine_actor.actor_options import ActorOptions
from engine_actor.core.engine import Engine
from engine_actor.core.exactness import settle_numerics
from engine_actor.decoding.load import load_decoder
from engine_actor.errors import InvalidOption
from engine_actor.limits import EngineLimits, Numerics
from engine_actor.memory.block_pool import Capacity
from engine_actor.memory.block_table import blocks_for
from engine_actor.memory.layout import pools_in_memory
from engine_actor.options import RequestOptions as EngineRequestOptions
from engine_actor.options import SamplingParams
from engine_actor.options import TurnOptions as EngineTurnOptions
from engine_actor.requests.event_buffer import EventBuffer
from engine_actor.requests.events import EngineEvent, EventFlags
from engine_actor.requests.request import Request
from engine_actor.weights.checkpoint import LoadProgress

EngineEventFlags = EventFlags
_SAMPLING = {field.name for field in fields(SamplingParams)}
_TURN = {field.name for field in fields(EngineTurnOptions)} - {"sampling"}


class RequestOptions:
    """Set before the request is created; it takes a copy."""

    def __init__(self) -> None:
        self._options = EngineRequestOptions()

    def set_max_session_tokens(self, tokens: int) -> None:
        """Longest sequence of all turns together; 0: what the engine allows."""
        self._options = replace(self._options, max_session_tokens=tokens)

    def set_num_beams(self, beams: int) -> None:
        """Only 1: more raises InvalidOption (F013)."""
        self._options = replace(self._options, num_beams=beams)

    def snapshot(self) -> EngineRequestOptions:
        return self._options


class TurnOptions:
    """The options of one turn, beginning with the defaults of its request. A turn takes a copy when it begins."""

    def __init__(self, request: OfflineRequest) -> None:
        self._options = request.defaults

    def set_max_generated_tokens(self, tokens: int) -> None:
        """0: no limit beyond the session's."""
        self.set(max_generated_tokens=tokens)

    def set(self, **options: Any) -> None:
        """Fields of the engine's TurnOptions and SamplingParams by name. Raises InvalidOption for a bad value or an
        unknown name."""
        self._options = _changed(self._options, options)

    def snapshot(self) -> EngineTurnOptions:
        return self._options


class OfflineRequest:
    """One sequence of many turns: the engine's `Request`, with defaults for its turns."""

    def __init__(self, handle: Request, defaults: EngineTurnOptions) -> None:
        self.handle = handle
        self.defaults = defaults

    def begin_turn(self, tokens: Sequence[int], options: TurnOptions | None = None) -> int:
        """As `Request.begin_turn`."""
        return self.handle.begin_turn(tokens, self.defaults if options is None else options.snapshot())

    def close(self) -> None:
        self.handle.close()


class OfflineEngine:
    """Calls belong on the thread that loaded it. `numerics`: what those of `limits` came to on this machine."""

    def __init__(self, engine: Engine, numerics: Numerics) -> None:
        self.engine = engine
        self.numerics = numerics

    def create_request(
        self, generation_params: Mapping[str, Any] | None = None, options: RequestOptions | None = None
    ) -> OfflineRequest:
        """`generation_params`: defaults of the request's turns, as `TurnOptions.set` takes them, and `num_beams`.
        Raises InvalidOption for a bad value or an unknown name; nothing is created then."""
        params = dict(generation_params or {})
        chosen = EngineRequestOptions() if options is None else options.snapshot()
        if "num_beams" in params:
            chosen = replace(chosen, num_beams=params.pop("num_beams"))
        defaults = _changed(EngineTurnOptions(), params)
        return OfflineRequest(self.engine.create_request(chosen), defaults)

    def can_serve(self, length: int) -> Capacity:
        """Whether a new sequence of `length` tokens fits: now, once others give blocks back, or never (F327)."""
        return self.engine.could_allocate(blocks_for(length, self.engine.pools.block_size))

    def create_event_buffer(self, capacity: int) -> EventBuffer:
        """Storage that every `run(buffer)` uses again, for a loop that makes no garbage (F061)."""
        return self.engine.create_event_buffer(capacity)

    def has_pending_requests(self) -> bool:
        return self.engine.has_pending_requests()

    def run(self, max_events: int | EventBuffer) -> Sequence[EngineEvent]:
        """At most so many events of committed steps. An empty list can be progress in a long prompt: go on while
        `has_pending_requests`."""
        return self.engine.run(max_events)


def load_engine(
    model: str,
    *,
    kv_memory: float = 0.3,
    max_sessions: int = 32,
    max_model_len: int | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    threads: int = 0,
    limits: EngineLimits | None = None,
    progress: LoadProgress | None = None,
) -> OfflineEngine:
    """Loads a Hugging Face folder or a GGUF file. kv_memory: bytes if > 1, else a share of the free memory.

    Raises UnreadableModel, UnsupportedModel or InvalidOption.
    """
    chosen = limits or EngineLimits()
    options = ActorOptions(model, dtype=dtype, device=device, threads=threads, limits=chosen)
    loaded = load_decoder(options, progress)
    pools = pools_in_memory(
        loaded.decoder.manifest,
        chosen,
        kv_memory=kv_memory,
        free_bytes=loaded.free_bytes,
        max_sessions=max_sessions,
        max_model_len=max_model_len,
    )
    engine = Engine(loaded.decoder, chosen, pools)
    numerics, _ = settle_numerics(loaded.decoder, chosen, pools)
    return OfflineEngine(engine, numerics)


def _changed(options: EngineTurnOptions, changes: Mapping[str, Any]) -> EngineTurnOptions:
    for name in changes:
        if name not in _SAMPLING | _TURN:
            raise InvalidOption("option", name, f"one of {', '.join(sorted(_SAMPLING | _TURN))}")
    sampling = replace(options.sampling, **{name: value for name, value in changes.items() if name in _SAMPLING})
    return replace(options, sampling=sampling, **{name: value for name, value in changes.items() if name in _TURN})
