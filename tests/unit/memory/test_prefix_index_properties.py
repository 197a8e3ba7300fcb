"""PrefixIndex against a dictionary of whole prefixes, with good hashes and with colliding ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.prefix_index import Digest, PrefixIndex, PrefixMatch, chained_sha256

SIZE = 2
sequences = st.lists(st.integers(0, 2), max_size=9)
salts = st.sampled_from([b"", b"tenant"])
Key = tuple[bytes, tuple[int, ...]]


class IndexMachine(RuleBasedStateMachine):
    """`entries`: (salt, tokens of the whole prefix) -> block. `tables`: blocks that sequences own."""

    @initialize(blocks=st.integers(2, 12))
    def build(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1)
        self.index = PrefixIndex(self.pool, SIZE, chained_sha256)
        self.entries: dict[Key, int] = {}
        self.known: dict[Key, PrefixMatch] = {}
        self.tables: list[tuple[bytes, list[int], list[int], int]] = []

    def expected(self, salt: bytes, tokens: list[int], most: int) -> list[int]:
        found = []
        for n in range(SIZE, most * SIZE + 1, SIZE):
            block = self.entries.get((salt, tuple(tokens[:n])))
            if block is None:
                break
            found.append(block)
        return found

    @rule(salt=salts, tokens=sequences)
    def match(self, salt: bytes, tokens: list[int]) -> None:
        full = (len(tokens) - 1) // SIZE if tokens else 0  # at least one token is left to compute
        expected = tuple(self.expected(salt, tokens, full))
        assert self.index.match(salt, tokens).blocks == expected
        known = self.known.get((salt, tuple(tokens)))
        self.known[salt, tuple(tokens)] = self.index.match(salt, tokens, known)
        assert self.known[salt, tuple(tokens)].blocks == expected

    @rule(salt=salts, tokens=sequences)
    def start(self, salt: bytes, tokens: list[int]) -> None:
        """A sequence adopts what is indexed and gets fresh blocks for the rest, if there are any."""
        adopted = self.index.match(salt, tokens).blocks
        for block in adopted:
            self.pool.pin(block)
        need = len(tokens) // SIZE - len(adopted)
        self.make_room(need)
        if need > self.pool.free_count:
            self.pool.free(adopted[::-1])
            return
        self.tables.append((salt, tokens, [*adopted, *self.pool.allocate(need)], len(adopted)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Some more blocks of a sequence become full."""
        which = data.draw(st.integers(0, len(self.tables) - 1))
        salt, tokens, blocks, first = self.tables[which]
        full = data.draw(st.integers(first, len(blocks)))
        self.index.insert(salt, tokens, blocks[:full], first)
        self.tables[which] = (salt, tokens, blocks, full)
        for i in range(first, full):
            head = (salt, tuple(tokens[: i * SIZE]))
            if i and head not in self.entries:
                break  # the chain above is gone
            self.entries.setdefault((salt, tuple(tokens[: (i + 1) * SIZE])), blocks[i])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, _, blocks, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(blocks[::-1])

    @rule(wanted=st.integers(0, 6))
    def make_room(self, wanted: int) -> None:
        while self.pool.free_count < wanted and (block := self.pool.oldest_idle()) is not None:
            ((salt, prefix),) = [key for key, held in self.entries.items() if held == block]
            below = [k for k in self.entries if k[0] == salt and k[1][: len(prefix)] == prefix]
            before = self.pool.free_count
            idle = sum(self.pool.is_idle(self.entries[key]) for key in below)
            for key in below:
                del self.entries[key]
            self.index.make_room(before + 1)  # one block, and all below it
            assert self.pool.free_count == before + idle
        self.index.make_room(wanted)  # nothing is left to give up, or nothing is wanted

    @invariant()
    def equals_the_model(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.entries)
        assert {b for b in range(1, self.pool.num_ids) if self.pool.is_indexed(b)} == set(self.entries.values())
        self.pool.check_integrity((block, 1) for _, _, blocks, _ in self.tables for block in blocks)


def few(parent: bytes, tokens: bytes) -> bytes:
    return bytes([tokens[0] % 2]) + parent[:1]


def blind_to_the_head(parent: bytes, tokens: bytes) -> bytes:
    return tokens


@given(st.lists(st.tuples(salts, sequences), max_size=8), salts, sequences, st.sampled_from([few, blind_to_the_head]))
def test_with_colliding_digests_a_match_is_still_the_same_prefix(
    inserted: list[tuple[bytes, list[int]]], salt: bytes, tokens: list[int], digest: Digest
) -> None:
    """Only the comparison of tokens, lineage and tenant keeps the answers right."""
    pool = BlockPool(64)
    index = PrefixIndex(pool, SIZE, digest)
    contents: dict[int, tuple[bytes, list[int]]] = {}
    for other_salt, other in inserted:
        blocks = pool.allocate(len(other) // SIZE)
        index.insert(other_salt, other, blocks, 0)
        contents |= {block: (other_salt, other[: (i + 1) * SIZE]) for i, block in enumerate(blocks)}
    for i, block in enumerate(index.match(salt, tokens).blocks):
        assert contents[block] == (salt, tokens[: (i + 1) * SIZE])


TestPrefixIndex = IndexMachine.TestCase
