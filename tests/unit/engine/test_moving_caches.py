"""A cache that was computed in one engine and is used in another: what is said, what is shared, what gives way."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.engine import Engine
from engine_actor.decoding.torch_decoder import TorchDecoder
from engine_actor.memory.kv_blocks import KvBlocks
from engine_actor.options import RequestOptions, TurnOptions
from engine_actor.requests.outcomes import StepOutcome
from engine_actor.requests.record import RequestStatus, Usage
from engine_actor.requests.request import Request
from engine_actor.sampling.logprobs import TokenLogprob
from tests.support import tiny_models
from tests.support.doubles import MixingDecoder, RecurrentDecoder, WindowedDecoder, build_engine, mixing_logits, run_out
from tests.support.engine_room import OpenedEngine
from tests.support.engine_view import view
from tests.support.engines import engine_of

VOCAB, EOS, CONTEXT = 12, 1, 40
SALTS = (b"", b"other")
LARGE = 2**30
TEN = [5, 9, 13, 21, 30, 3, 2, 8, 4, 11]


def sent(kv: KvBlocks) -> KvBlocks:
    """As it comes out of an object store: its buffers are somebody else's, and read-only."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(kv, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 600, "the content is not part of the message"
    received: KvBlocks = pickle.loads(message, buffers=[bytes(buffer) for buffer in buffers])
    assert not received.content.flags.writeable
    return received


# -- random conversations and homes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talk:
    salt: bytes
    prompt: list[int]
    answer: int
    cut: float
    fate: str = "dormant"


def talks(fates: list[str], most: int) -> st.SearchStrategy[list[Talk]]:
    prompts = st.lists(st.sampled_from([2, 3]), min_size=1, max_size=14)
    one = st.builds(
        Talk,
        st.sampled_from(SALTS),
        prompts,
        st.integers(1, 9),
        st.sampled_from([1.0, 1.0, 0.6]),
        st.sampled_from(fates),
    )
    return st.lists(one, min_size=1, max_size=most)


configs = st.fixed_dictionaries({"num_blocks": st.integers(4, 30), "prefix_reuse": st.booleans()})


def said(sequence: list[int], count: int, vocab: int = VOCAB) -> list[int]:
    answer: list[int] = []
    while len(answer) < count:
        token = int(np.argmax(mixing_logits([*sequence, *answer], vocab)))
        if token == EOS:
            break
        answer.append(token)
    return answer


def home(block_size: int, **config: Any) -> Engine:
    decoder = MixingDecoder(VOCAB, EOS, CONTEXT)
    return build_engine(decoder, block_size=block_size, max_residents=7, preemption=False, max_length=CONTEXT, **config)


def begin(engine: Engine, talk: Talk) -> Request:
    request = engine.create_request(RequestOptions(salt=talk.salt))
    request.begin_turn(talk.prompt, TurnOptions(talk.answer))
    return request


def finish(engine: Engine, request: Request, spare: list[Request]) -> None:
    """Runs until the turn has ended; while it waits for memory, dormant requests go one by one."""
    while request.status in (RequestStatus.WAITING, RequestStatus.RUNNING):
        engine.run(64)
        engine.check_integrity()
        if engine.last_report.outcome is StepOutcome.CAPACITY_DEFERRED:
            spare.pop().close()
    while engine.has_pending_requests() and engine.last_report.outcome is StepOutcome.COMMITTED:
        engine.run(64)


def furnished(block_size: int, config: dict[str, Any], guests: list[Talk]) -> tuple[Engine, list[Request]]:
    """A home where conversations have closed, are dormant, run, or have just been begun."""
    engine, requests = home(block_size, **config), []
    for fate in ("closed", "dormant", "running", "new"):
        for talk in (talk for talk in guests if talk.fate == fate):
            request = begin(engine, talk)
            requests.append(request)
            if fate in ("closed", "dormant"):
                finish(engine, request, requests[:-1])
            if fate == "closed":
                request.close()
            if fate == "running":
                engine.run(64)
    return engine, requests


@given(
    st.integers(2, 4),
    configs,
    talks(["dormant"], 3),
    talks(["closed", "dormant", "running", "new"], 4),
    st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4),
)
def test_what_moves_goes_on_as_before_and_nothing_gives_way_for_it(
    block_size: int, config: dict[str, Any], moving: list[Talk], guests: list[Talk], more: list[int]
) -> None:
    old = home(block_size, num_blocks=60)
    new, others = furnished(block_size, config, guests)
    twin, _others = furnished(block_size, config, guests)
    arrived: list[tuple[Request, Request]] = []
    for talk in moving:
        request = begin(old, talk)
        finish(old, request, [])
        request.rewind(int(talk.cut * request.current_length))
        kv = old.read_cache(request, LARGE)
        assert (kv is None) == (request.num_computed_tokens == 0)
        if kv is None:
            continue
        before = new.stats()
        restored = new.restore_request(request.tokens, sent(kv), RequestOptions(salt=talk.salt))
        new.check_integrity()
        if restored is None:
            assert new.stats() == before
            continue
        assert (restored.tokens, restored.num_computed_tokens) == (request.tokens, request.num_computed_tokens)
        used = before["blocks_free"] + before["blocks_idle"] - new.available_blocks
        assert used <= new.blocks_of(restored) and new.available_blocks >= new.stats()["blocks_free"]
        arrived.append((request, restored))
    # Nobody is put off who would not have been; prompts may even find something that moved.
    new.run(64)
    twin.run(64)
    new.check_integrity()
    put_off, anyway = ({d.request_id for d in engine.last_report.deferrals} for engine in (new, twin))
    assert put_off <= anyway
    for other in others:
        finish(new, other, [restored for _, restored in arrived] + [o for o in others if o is not other])
    for request, restored in arrived:
        too_long = request.current_length + len(more) + 3 > block_size * config["num_blocks"]
        if restored.status is RequestStatus.CLOSED or too_long:
            continue
        expected = said([*request.tokens, *more], 3)
        for engine, goes_on in ((old, request), (new, restored)):
            spare = [r for _, r in arrived if r is not goes_on] + others if engine is new else []
            length = goes_on.current_length + len(more)
            goes_on.begin_turn(more, TurnOptions(3))
            finish(engine, goes_on, spare)
            assert goes_on.tokens[length:] == expected
        assert restored.usage == request.usage


# -- room -------------------------------------------------------------------------------------------------------------


def computed(tokens: list[int], room: OpenedEngine | None = None) -> tuple[list[int], KvBlocks]:
    """A sequence that begins with `tokens`, and its cache."""
    room = room or OpenedEngine()
    request = room.dormant(tokens)
    kv = room.engine.read_cache(request, LARGE)
    assert kv is not None
    return request.tokens, kv


@pytest.mark.parametrize(("resident", "free"), [(12, 3), (13, 2), (17, 1), (21, 0)])
def test_free_and_idle_blocks_are_taken_and_no_others(resident: int, free: int) -> None:
    tokens, kv = computed(TEN)
    assert kv.positions == 10  # three blocks
    room = OpenedEngine(num_blocks=8, prefix_reuse=True)
    room.dormant(list(range(40, 49))).close()  # leaves two idle blocks
    held = room.dormant(list(range(resident)))
    assert (room.pool.free_count, room.pool.idle_count) == (free, 2)
    assert (room.engine.restore_request(tokens, kv) is not None) == (free + 2 >= 3)
    assert room.pool.idle_count == (2 if free in (0, 3) else free - 1)
    assert room.engine.blocks_of(held) == 6 - free
    room.engine.check_integrity()


def test_blocks_that_turns_are_about_to_take_are_left_to_them() -> None:
    tokens, kv = computed(TEN)
    room = OpenedEngine(num_blocks=5)
    running = room.resident([6])
    assert room.pool.free_count == 4
    # One is left for the turn that runs; a second turn that waits wants one for its prompt.
    waiting = room.add([7, 8])
    assert room.engine.restore_request(tokens, kv) is None
    waiting.close()
    assert room.engine.restore_request(tokens, kv) is not None
    assert running.status is RequestStatus.RUNNING


def test_no_more_requests_own_memory_than_may() -> None:
    tokens, kv = computed(TEN)
    room = OpenedEngine(max_residents=2)
    room.dormant([6])
    restored = room.engine.restore_request(tokens, kv)
    assert restored is not None
    assert room.engine.restore_request(tokens, kv) is None
    restored.close()
    room.add([7])  # waits, and takes the last place in the next step
    assert room.engine.restore_request(tokens, kv) is None


def test_a_cache_of_another_kind_is_of_no_use() -> None:
    tokens, kv = computed(TEN)
    assert OpenedEngine(block_size=8).engine.restore_request(tokens, kv) is None
    stranger = MixingDecoder()
    stranger.manifest = replace(stranger.manifest, cache_identity="other weights")
    assert OpenedEngine(stranger).engine.restore_request(tokens, kv) is None
    assert OpenedEngine(max_length=10).engine.restore_request(tokens, kv) is None  # 11 tokens
    assert OpenedEngine(max_length=11).engine.restore_request(tokens, kv) is not None


def test_a_cache_that_is_too_large_or_not_all_stays_where_it_is() -> None:
    room = OpenedEngine()
    request = room.dormant(TEN)
    size = 3 * room.decoder.manifest.paged.block_bytes(4)
    assert room.engine.read_cache(request, size) is not None
    assert room.engine.read_cache(request, size - 1) is None
    assert room.engine.read_cache(room.resident(TEN), LARGE) is None  # its turn runs
    for decoder in (RecurrentDecoder(), WindowedDecoder()):
        other = OpenedEngine(decoder, chunk_size=4)
        assert other.engine.read_cache(other.dormant(TEN), LARGE) is None
        kv = KvBlocks("tokens, blocks of 4", 10, np.zeros((1, 3, 4), np.int64))
        assert other.engine.restore_request(TEN, kv) is None


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, kv = computed(TEN)
    room = OpenedEngine()

    def fail(*_: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(room.decoder, "write_blocks", fail)
    before = room.engine.stats()
    with pytest.raises(MemoryError):
        room.engine.restore_request(tokens, kv)
    assert room.engine.stats() == before
    room.engine.check_integrity()


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_what_two_conversations_share_is_shared_again_and_others_find_it() -> None:
    system = [40, 41, 42, 43, 44, 45, 46, 47]
    old, new = (OpenedEngine(MixingDecoder(), prefix_reuse=True) for _ in range(2))
    moved = []
    for tail in ([1, 2, 3], [4, 5]):
        tokens, kv = computed([*system, *tail], old)
        restored = new.engine.restore_request(tokens, kv, RequestOptions(salt=b"a"))
        assert restored is not None
        moved.append(restored)
    first, second = map(new.blocks, moved)
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])
    for restored in moved:
        prompt = [*restored.tokens, 6]
        restored.begin_turn([6], TurnOptions(5))
        run_out(new.engine)
        assert restored.tokens[len(prompt) :] == said(prompt, 5, vocab=64)
    for salt, cached in ((b"a", 8), (b"b", 0)):
        request = new.engine.create_request(RequestOptions(salt=salt))
        request.begin_turn([*system, 9], TurnOptions(2))
        run_out(new.engine)
        assert request.usage.cached_tokens == cached


def test_a_cache_that_is_known_up_to_its_last_full_block_is_not_written_again() -> None:
    old, new = OpenedEngine(prefix_reuse=True), OpenedEngine(prefix_reuse=True)
    tokens, kv = computed(TEN[:8], old)
    assert kv.positions == 8 and len(tokens) == 9
    first, second = (new.engine.restore_request(tokens, kv) for _ in range(2))
    assert first is not None and second is not None
    assert new.blocks(first) == new.blocks(second)
    new.engine.check_integrity()


# -- a real model -----------------------------------------------------------------------------------------------------


def torch_engine(folder: Path) -> Engine:
    decoder = TorchDecoder.load(folder, dtype="bfloat16", device="cpu")
    return engine_of(decoder, num_blocks=32, block_size=4, max_batch_size=4)


def turn(engine: Engine, request: Request, tokens: list[int]) -> tuple[list[TokenLogprob | None], Usage]:
    request.begin_turn(tokens, TurnOptions(12, ignore_eos=True, logprobs=3))
    events = run_out(engine)
    return [event.logprob for event in events], request.usage


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_next_turn_of_a_real_model_is_the_same_bit_for_bit(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build(family), tmp_path)
    old, new = torch_engine(folder), torch_engine(folder)
    other = new.create_request()
    turn(new, other, [9, 8, 7, 6, 5])
    request = old.create_request()
    turn(old, request, TEN)
    kv = old.read_cache(request, LARGE)
    assert kv is not None and kv.content.nbytes == 6 * view(old).decoder.manifest.paged.block_bytes(4)
    restored = new.restore_request(request.tokens, sent(kv))
    assert restored is not None
    there = turn(new, restored, [3, 1, 4])
    assert there == turn(old, request, [3, 1, 4])
    assert there[1].cached_tokens == 21 and len(there[0]) == 12
