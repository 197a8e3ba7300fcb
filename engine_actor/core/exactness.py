"""Whether a decoder's rows are the same in any company: what it declares, and what a probe on this machine finds.

The probe asks the engine's own questions, of the real weights, with the decoder's own pools: one prompt alone and
whole, then in chunks, then beside other prompts and their decodes. Tokens and logarithms of probabilities have to be
equal bit for bit. It proves nothing for every length; it finds a product, or an attention, that reduces in another
order as soon as the shape of a call is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_actor.core.engine import Engine
from engine_actor.decoding.decoder import Decoder, Launched, PackedStep
from engine_actor.errors import EngineUnhealthy, InvalidOption
from engine_actor.limits import EngineLimits, Numerics
from engine_actor.manifest import DecoderManifest
from engine_actor.memory.layout import PoolGeometry, PoolLayout
from engine_actor.options import TurnOptions
from engine_actor.requests.events import EngineEvent
from engine_actor.requests.record import RequestStatus
from engine_actor.sampling.logprobs import TokenLogprob
from engine_actor.sampling.sample_row import SampleRow

PROMPT_TOKENS = 17  # one more than a block or a tile usually has
ANSWER_TOKENS = 2
COMPANY_TOKENS = 5
COMPANY = 3
LOGPROBS = 5
MOST_ROLLBACKS = 3

_PRICE = "near ties may fall either way in other company, so an answer may differ from run to run and after a failover"


def settle_numerics(decoder: Decoder, limits: EngineLimits, pools: PoolLayout) -> tuple[Numerics, str | None]:
    """EXACT or FAST, whichever `limits.numerics` comes to here, and what to tell the operator of it. To be called when
    an engine has had the pools allocated, and before it has requests.

    Raises InvalidOption where EXACT was chosen and the probe finds a difference (the engine itself refuses a decoder
    that does not declare it), and EngineUnhealthy where the decoder cannot make the steps of the probe.
    """
    if limits.numerics is Numerics.FAST:
        return Numerics.FAST, None
    if not decoder.row_invariant:
        return Numerics.FAST, f"numerics fast, since the kernels of this device depend on the batch: {_PRICE}"
    difference = find_difference(decoder, limits, pools)
    if difference is None:
        return Numerics.EXACT, None
    if limits.numerics is Numerics.EXACT:
        raise InvalidOption("numerics", "exact", f"'auto' or 'fast' on this machine: {difference}")
    return Numerics.FAST, f"numerics fast, since {difference}: {_PRICE}"


def find_difference(decoder: Decoder, limits: EngineLimits, pools: PoolLayout) -> str | None:
    """In which company a row was another one; None: in none. Takes some twelve steps, of 100 tokens in all. Raises
    EngineUnhealthy."""
    length = min(PROMPT_TOKENS, pools.max_length - COMPANY_TOKENS)
    rows = min(COMPANY, limits.max_batch_size, pools.max_residents, pools.tokens // _whole_blocks(pools))
    if length < 1 or rows < 1:
        return None  # a pool in which nothing that could differ has room
    prompts = [[(7 * i + 3 * row + 2) % decoder.manifest.vocab_size for i in range(length)] for row in range(rows)]

    def first_of(prompts: list[list[int]], chunk: int) -> list[tuple[int | None, TokenLogprob | None]]:
        return _first_answer(decoder, replace(limits, chunk_size=chunk), pools, prompts)

    whole = limits.chunk_size or limits.max_scheduled_tokens
    alone = first_of(prompts[:1], whole)
    if first_of(prompts[:1], min(7, whole)) != alone:
        return "a prompt in chunks is not the same as whole"
    if first_of(prompts, whole) != alone:
        return f"a row beside {rows - 1} others is not the same as alone"
    return None


def _whole_blocks(pools: PoolLayout) -> int:
    """Positions of the blocks that one sequence of the probe takes."""
    length = min(PROMPT_TOKENS + COMPANY_TOKENS, pools.max_length)
    return -(-length // pools.block_size) * pools.block_size


def _first_answer(
    decoder: Decoder, limits: EngineLimits, pools: PoolLayout, prompts: list[list[int]]
) -> list[tuple[int | None, TokenLogprob | None]]:
    """What the first prompt is answered, which comes when the others have begun to decode."""
    engine = Engine(_AllocatedDecoder(decoder), replace(limits, numerics=Numerics.FAST, prefix_reuse=False), pools)

    def run() -> list[EngineEvent]:
        events = list(engine.run(COMPANY))
        if engine.metrics.rollbacks > MOST_ROLLBACKS:  # a step that fails is to be tried again, but not for ever
            raise EngineUnhealthy(f"the probe of numerics makes no progress. {events[-1].message}")
        return events

    first, *others = [engine.create_request() for _ in prompts]
    for request, prompt in zip(others, prompts[1:], strict=True):
        request.begin_turn(prompt, TurnOptions(COMPANY_TOKENS, ignore_eos=True))
        run()
    first.begin_turn(prompts[0], TurnOptions(ANSWER_TOKENS, ignore_eos=True, logprobs=LOGPROBS))
    answer = []
    while first.status is not RequestStatus.IDLE or engine.has_pending_requests():
        answer += [(event.token, event.logprob) for event in run() if event.request_id == first.id]
    for request in (first, *others):
        request.close()
    return answer


class _AllocatedDecoder:
    """The same decoder for an engine of the probe: its pools are there."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def manifest(self) -> DecoderManifest:
        return self._decoder.manifest

    @property
    def row_invariant(self) -> bool:
        return self._decoder.row_invariant

    def allocate(self, pools: PoolGeometry) -> None:
        """Done by the engine that the pools are for."""

    def launch(self, step: PackedStep, rows: Sequence[SampleRow]) -> Launched:
        return self._decoder.launch(step, rows)

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        return self._decoder.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], content: Any) -> None:
        self._decoder.write_blocks(blocks, content)
