"""Prefix reuse: full blocks of equal prefixes are found by content, shared, and evicted tails first."""

from __future__ import annotations

import pytest

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.prefix_index import PrefixIndex, chained_sha256
from tests.support.doubles import solo
from tests.support.engine_room import FIFO, OpenedEngine
from tests.support.engine_view import entries_of, record_of

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]
Index = tuple[PrefixIndex, BlockPool]


def index_of(blocks: int = 8, constant_hash: bool = False) -> Index:
    pool = BlockPool(blocks + 1)
    if constant_hash:
        return PrefixIndex(pool, 4, lambda parent, tokens: b"same"), pool
    return PrefixIndex(pool, 4), pool


def put(index: Index, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Indexes a sequence in fresh blocks, which stay owned."""
    blocks = index[1].allocate(len(tokens) // 4)
    index[0].insert(salt, tokens, blocks, 0)
    index[0].check_integrity()
    return blocks


def found(index: Index, salt: bytes, tokens: list[int]) -> list[int]:
    return list(index[0].match(salt, tokens).blocks)


def test_the_longest_indexed_prefix_is_adopted() -> None:
    index = index_of()
    blocks = put(index, EIGHT)

    def match(salt: bytes, tokens: list[int]) -> list[int]:
        return found(index, salt, tokens)

    assert match(b"", [*EIGHT, 9]) == blocks
    assert match(b"", [1, 2, 3, 4, 50, 6, 7, 8, 9]) == blocks[:1]
    assert match(b"", [5, 6, 7, 8, 9]) == []


def test_the_last_token_is_always_computed() -> None:
    index = index_of()
    blocks = put(index, [1, 2, 3, 4])
    assert found(index, b"", [1, 2, 3, 4]) == []
    assert found(index, b"", [1, 2, 3, 4, 5]) == blocks
    blocks = [*blocks, *put(index, EIGHT)[1:]]
    assert found(index, b"", EIGHT) == blocks[:1]


def test_an_equal_hash_is_not_a_match() -> None:
    index = index_of(constant_hash=True)
    original = put(index, [1, 2, 3, 4])
    put(index, [5, 6, 7, 8])  # collides: not indexed
    assert len(index[0]) == 1 and index[0].collisions == 1
    assert found(index, b"", [5, 6, 7, 8, 9]) == [] and index[0].collisions == 2
    assert found(index, b"", [1, 2, 3, 4, 9]) == original


def test_a_tail_does_not_outlive_its_head() -> None:
    """An impostor with the head's hash cannot bring the old tail back."""

    def weak(parent: bytes, tokens: bytes) -> bytes:
        return b"head" if not parent else b"tail" + tokens

    pool = BlockPool(9)
    index = PrefixIndex(pool, 4, weak)
    old = put((index, pool), EIGHT)
    pool.free([old[0]])  # the head becomes idle, the tail is still owned
    index.make_room(pool.free_count + 1)
    assert len(index) == 0 and not pool.is_indexed(old[1])
    (impostor,) = put((index, pool), [9, 9, 9, 9])
    assert found((index, pool), b"", [9, 9, 9, 9, 5, 6, 7, 8, 1]) == [impostor]
    pool.free([old[1]])  # as any owned block
    assert sorted(pool.free_ids()) == sorted({*range(1, 9)} - {impostor})


def test_equal_tails_of_different_heads_are_told_apart_by_lineage_not_by_hash() -> None:
    pool = BlockPool(9)
    index = PrefixIndex(pool, 4, lambda parent, tokens: tokens)  # blind to the head
    first = put((index, pool), EIGHT)
    second = put((index, pool), [9, 9, 9, 9, 5, 6, 7, 8])  # its tail collides with the first one's
    assert index.collisions == 1 and not pool.is_indexed(second[1])
    assert found((index, pool), b"", [9, 9, 9, 9, 5, 6, 7, 8, 1]) == second[:1]
    assert found((index, pool), b"", [*EIGHT, 1]) == first


def test_tails_are_evicted_first() -> None:
    index, pool = index_of(2)
    blocks = put((index, pool), EIGHT)
    pool.free(blocks[::-1])  # as a table is released
    assert (pool.free_count, pool.idle_count) == (0, 2)
    index.make_room(1)
    assert pool.free_ids() == [blocks[1]] and found((index, pool), b"", [*EIGHT, 9]) == blocks[:1]
    index.check_integrity()


def test_no_more_owners_can_be_dropped_than_there_are() -> None:
    index, pool = index_of(3)
    (block,) = put((index, pool), EIGHT[:4])
    pool.pin(block)
    for wrong in ([block, block, block], [block, block]):
        with pytest.raises(ContractViolation):
            pool.free(wrong)
    pool.free([block])
    pool.free([block])
    with pytest.raises(ContractViolation, match="no owner to drop"):
        pool.free([block])  # the index's hold is not the caller's to drop
    assert pool.is_idle(block) and found((index, pool), b"", [*EIGHT[:4], 9]) == [block]


def test_the_least_recently_wanted_chain_is_evicted_first() -> None:
    index, pool = index_of(4)
    first, second = put((index, pool), [1] * 8), put((index, pool), [2] * 8)
    pool.free(first[::-1])
    pool.free(second[::-1])
    for block in found((index, pool), b"", [1] * 9):  # the first chain is adopted and released again
        pool.pin(block)
    pool.free(first[::-1])
    index.make_room(2)
    assert found((index, pool), b"", [1] * 9) == first and found((index, pool), b"", [2] * 9) == []
    assert pool.free_ids() == second[::-1]


def test_tenants_never_share() -> None:
    index = index_of()
    mine = put(index, EIGHT, b"mine")
    assert found(index, b"yours", [*EIGHT, 9]) == [] and found(index, b"", [*EIGHT, 9]) == []
    yours = put(index, EIGHT, b"yours")
    assert found(index, b"mine", [*EIGHT, 9]) == mine and found(index, b"yours", [*EIGHT, 9]) == yours
    # A salt that equals the digest of another chain's head does not open that chain.
    head = entries_of(index[0])[mine[0]].digest
    assert found(index, head, [5, 6, 7, 8, 9]) == []


def test_a_duplicate_stays_private_and_its_continuation_is_indexed_under_the_first() -> None:
    index = index_of()
    first = put(index, [1, 2, 3, 4])
    second = put(index, EIGHT)
    assert not index[1].is_indexed(second[0]) and index[1].is_indexed(second[1])
    assert found(index, b"", [*EIGHT, 9]) == [first[0], second[1]]


def test_an_earlier_answer_is_extended_and_is_not_trusted_when_its_chain_is_gone() -> None:
    hashed = []

    def digest(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return chained_sha256(parent, tokens)

    pool = BlockPool(5)
    index = PrefixIndex(pool, 4, digest)
    tokens = [*EIGHT, *EIGHT, 9]
    first = put((index, pool), EIGHT)
    known = index.match(b"", tokens)
    hashed.clear()
    assert index.match(b"", tokens, known).blocks == tuple(first) and len(hashed) == 1
    pool.free(first[::-1])
    index.make_room(4)  # the chain is gone, and its blocks get other content
    other = put((index, pool), [7] * 8)
    assert set(other) <= set(first) | {3, 4}
    assert index.match(b"", tokens, known).blocks == ()
    again = put((index, pool), EIGHT)
    assert index.match(b"", tokens, known).blocks == tuple(again)


def test_a_duplicate_that_grows_does_not_hash_its_beginning_again() -> None:
    """As of two equal prompts that were computed at the same time. What was known is not trusted when it is gone."""
    hashed = []

    def digest(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return chained_sha256(parent, tokens)

    pool = BlockPool(9)
    index = PrefixIndex(pool, 4, digest)
    first = put((index, pool), EIGHT)
    second = pool.allocate(3)
    known = index.insert(b"", EIGHT, second[:2], 0)
    assert known is entries_of(index)[first[1]]
    hashed.clear()
    twelve = [*EIGHT, 9, 9, 9, 9]
    index.insert(b"", twelve, second, 2, known)
    assert len(hashed) == 1 and found((index, pool), b"", [*twelve, 5]) == [*first, second[2]]
    pool.free(first[::-1])
    index.make_room(pool.free_count + 1)  # the chain goes, and the duplicate's tail with it
    index.check_integrity()
    assert index.insert(b"", twelve, second, 2, known) is None and len(index) == 1
    assert found((index, pool), b"", [*twelve, 5]) == first[:1]


# -- through the engine -----------------------------------------------------------------------------------------------

SYSTEM = [3 + i % 40 for i in range(500)]
EIGHT_UP = [10, 11, 12, 13, 14, 15, 16, 17, 18]


def prefills(room: OpenedEngine) -> int:
    return room.engine.metrics.prefill_tokens


def reuse(**config: int) -> OpenedEngine:
    return OpenedEngine(
        **{"num_blocks": 200, "block_size": 16, "max_length": 1024, "prefix_reuse": True} | FIFO | config
    )


def test_a_shared_system_prompt_is_computed_once() -> None:
    room = reuse()
    first = room.add([*SYSTEM, 7, 9], max_generated_tokens=5)
    room.run_out()
    assert prefills(room) == 502
    second = room.add([*SYSTEM, 8, 6, 4], max_generated_tokens=5)
    room.run_out()
    assert prefills(room) == 502 + 503 - 496  # 31 full blocks of 16 are adopted
    assert second.usage.cached_tokens == 496 and first.usage.cached_tokens == 0
    assert room.engine.metrics.adopted_tokens == 496
    assert room.tokens[second.id] == solo([*SYSTEM, 8, 6, 4], 5)
    assert room.blocks(second)[:31] == room.blocks(first)[:31]


def test_a_hit_and_a_miss_give_the_same_tokens_and_tenants_do_not_meet() -> None:
    room = reuse()
    prompt = [*SYSTEM[:40], 7]
    for salt in (b"a", b"a", b"b"):
        request = room.add(prompt, max_generated_tokens=5, salt=salt)
        room.run_out()
        assert room.tokens[request.id] == solo(prompt, 5)
    assert prefills(room) == 41 + (41 - 32) + 41


def test_closed_sessions_leave_blocks_to_adopt_until_they_are_needed() -> None:
    room = reuse(num_blocks=4)
    prompt = SYSTEM[:33]
    room.add(prompt, max_generated_tokens=1)
    room.run_out()
    room.requests.pop().close()
    assert (room.pool.free_count, room.pool.idle_count, room.pool.available) == (2, 2, 4)
    hit = room.add(prompt, max_generated_tokens=1)
    room.run_out()
    assert hit.usage.cached_tokens == 32
    hit.close()
    big = room.add([50] * 60, max_generated_tokens=1)  # needs all four blocks
    room.run_out()
    assert room.tokens[big.id] == solo([50] * 60, 1)
    big.close()
    miss = room.add(prompt, max_generated_tokens=1)
    room.run_out()
    assert miss.usage.cached_tokens == 0 and room.tokens[miss.id] == room.tokens[hit.id]


def test_adopted_idle_blocks_are_counted_once_and_never_taken_by_the_same_step() -> None:
    """Room for the rest of the prompt must not be made of the blocks that it adopts."""
    room = reuse(num_blocks=4)
    room.add(SYSTEM[:33], max_generated_tokens=1)
    room.run_out()
    room.requests.pop().close()
    prompt = [*SYSTEM[:32], *[50] * 30]  # two adopted, two more: exactly the pool
    exact = room.add(prompt, max_generated_tokens=1)
    other = room.add([9], max_generated_tokens=1)
    plan = room.plan()
    assert [row.record.id for row in plan.rows] == [exact.id] and plan.deferrals[0].missing_blocks == 1
    room.step()
    assert exact.usage.cached_tokens == 32 and room.tokens[exact.id] == solo(prompt, 1)
    exact.close()
    room.run_out()
    assert room.tokens[other.id] == solo([9], 1)


def test_a_match_is_not_remembered_across_turns_of_equal_length() -> None:
    """A prompt that waited, was cancelled, rewound and replaced by another of the same length."""
    room = reuse(num_blocks=3, block_size=4)
    a = [*range(3, 11), 20]
    seen = room.add(a[:5], max_generated_tokens=1)
    room.run_out()
    waiting = room.add(a, max_generated_tokens=1)
    assert room.plan().deferrals[0].request_id == waiting.id  # its prefix has been looked up
    waiting.cancel_turn(1)
    room.step()
    waiting.rewind(0)
    b = [*range(40, 48), 20]
    waiting.begin_turn(b, record_of(waiting).turn_options)
    seen.close()
    room.run_out()
    assert waiting.usage.cached_tokens == 0 and room.tokens[waiting.id] == solo(b, 1)


def test_rewind_into_a_shared_block_falls_to_its_start() -> None:
    room = reuse(block_size=4)
    first = room.add(EIGHT_UP, max_generated_tokens=1)
    room.run_out()
    second = room.add([*EIGHT_UP, 50], max_generated_tokens=1)
    room.run_out()
    assert second.usage.cached_tokens == 8
    second.rewind(6)
    assert (second.current_length, second.num_computed_tokens) == (6, 4)
    second.begin_turn([33], record_of(second).turn_options)
    room.run_out()
    assert room.tokens[second.id][-1] == solo([*EIGHT_UP[:6], 33], 1)[0]
    first.begin_turn([34], record_of(first).turn_options)
    room.run_out()
    assert room.tokens[first.id][-1] == solo(first.tokens[:11], 1)[0]


def test_what_follows_a_rewind_is_not_indexed_under_what_was_forgotten() -> None:
    """The second of two equal prompts keeps private blocks; after its rewind it goes on in another way."""
    room = reuse(block_size=4)
    pair = [room.add(EIGHT_UP, max_generated_tokens=1) for _ in range(2)]
    room.run_out()
    second = pair[1]
    assert not any(room.pool.is_indexed(block) for block in room.blocks(second))
    second.rewind(4)
    second.begin_turn([40, 41, 42, 43, 44], record_of(second).turn_options)
    room.run_out()
    for beginning, cached in ((EIGHT_UP[:8], 8), (EIGHT_UP[:4], 8)):
        prompt = [*beginning, 40, 41, 42, 43, 50]
        request = room.add(prompt, max_generated_tokens=1)
        room.run_out()
        assert (request.usage.cached_tokens, room.tokens[request.id]) == (cached, solo(prompt, 1))
        request.close()
