"""Full blocks of equal prefixes, found by content and shared.

An entry is one full block. Its key is sha256(salt or parent's digest, the block's tokens), so a key stands for the
whole prefix; still, the hash is never proof: on a hit the tokens are compared, and the entry must hang under the entry
that was matched before it. Tenants have different salts and never meet.

The index is one owner of each of its blocks. A block that nobody else owns is idle: it stays adoptable until the pool
needs it, oldest first and tails before heads (tables are released in reverse).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool

Digest = Callable[[bytes, bytes], bytes]


def chained_sha256(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


class IndexEntry:
    __slots__ = ("block", "children", "digest", "parent", "salt", "tokens")

    def __init__(self, block: int, digest: bytes, salt: bytes, tokens: bytes, parent: IndexEntry | None) -> None:
        self.block = block
        self.digest = digest
        self.salt = salt
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, IndexEntry] = {}  # by block

    def stands_for(self, salt: bytes, parent: IndexEntry | None, tokens: bytes) -> bool:
        return self.tokens == tokens and self.parent is parent and self.salt == salt


class PrefixMatch:
    """Shared blocks in order, and the entry of the last of them."""

    __slots__ = ("blocks", "last")

    def __init__(self, blocks: tuple[int, ...], last: IndexEntry | None) -> None:
        self.blocks = blocks
        self.last = last


NO_MATCH = PrefixMatch((), None)


class PrefixIndex:
    def __init__(self, pool: BlockPool, block_size: int, digest: Digest = chained_sha256) -> None:
        self._pool = pool
        self._block_size = block_size
        self._digest = digest
        self._by_digest: dict[bytes, IndexEntry] = {}
        self._by_block: dict[int, IndexEntry] = {}
        self.generation = 0
        self.collisions = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, salt: bytes, tokens: Sequence[int], earlier: PrefixMatch | None = None) -> PrefixMatch:
        """The longest indexed prefix of `tokens`. At least one token is left to compute, since the answer needs its
        logits. Changes nothing.

        `earlier` is an earlier answer for the same salt and tokens. As long as its last entry is still indexed, so are
        all above it, and only what lies behind is looked up: a prompt that waits is not hashed anew in every step.
        """
        blocks: list[int] = []
        last: IndexEntry | None = None
        if earlier is not None and earlier.last is not None and self._by_block.get(earlier.last.block) is earlier.last:
            blocks, last = list(earlier.blocks), earlier.last
        for start in range(len(blocks) * self._block_size, len(tokens) - self._block_size, self._block_size):
            entry = self._find(salt, last, self._packed(tokens, start))
            if entry is None:
                break
            blocks.append(entry.block)
            last = entry
        return PrefixMatch(tuple(blocks), last)

    def insert(
        self,
        salt: bytes,
        tokens: Sequence[int],
        blocks: Sequence[int],
        first: int,
        known: IndexEntry | None = None,
    ) -> IndexEntry | None:
        """Indexes the full blocks first, first + 1, ... of a sequence; `blocks` is its table up to the last full one.
        Returns the entry that stands for the last of them, which the next call for this sequence takes as `known`.

        A block whose content is indexed already stays private to its table: tables are append-only, duplicates are
        not merged. Indexing stops, with None, where the chain above is no longer indexed.
        """
        parent: IndexEntry | None = None
        if first:
            parent = self._by_block.get(blocks[first - 1])
            if parent is None and known is not None and self._by_block.get(known.block) is known:
                parent = known
            if parent is None:
                parent = self._walk(salt, tokens, first)
                if parent is None:
                    return None
        for i in range(first, len(blocks)):
            packed = self._packed(tokens, i * self._block_size)
            key = self._digest(parent.digest if parent else salt, packed)
            entry = self._by_digest.get(key)
            if entry is None:
                entry = IndexEntry(blocks[i], key, salt, packed, parent)
                self._pool.hold_for_index(blocks[i])
                self._by_digest[key] = entry
                self._by_block[blocks[i]] = entry
                if parent is not None:
                    parent.children[entry.block] = entry
                self.generation += 1
            elif not entry.stands_for(salt, parent, packed):
                self.collisions += 1
                return None
            parent = entry
        return parent

    def make_room(self, free_wanted: int) -> None:
        """Gives up idle blocks until the pool has `free_wanted` free ones, or none is idle."""
        while self._pool.free_count < free_wanted:
            block = self._pool.oldest_idle()
            if block is None:
                return
            self._drop(self._by_block[block])

    def check_integrity(self) -> None:
        """Each entry is held in the pool, found by its digest and hangs under its parent; no other block is held."""
        for block, entry in self._by_block.items():
            sound = entry.block == block and self._by_digest.get(entry.digest) is entry
            linked = entry.parent is None or entry.parent.children.get(block) is entry
            if not (sound and linked and self._pool.is_indexed(block)):
                raise ContractViolation(f"prefix index: the entry of block {block} is not consistent")
        held = sum(self._pool.is_indexed(b) for b in range(self._pool.num_ids))
        if held != len(self._by_block) or held != len(self._by_digest):
            raise ContractViolation(f"prefix index: {len(self._by_block)} entries, {held} blocks held")

    def _packed(self, tokens: Sequence[int], start: int) -> bytes:
        return array("q", tokens[start : start + self._block_size]).tobytes()

    def _find(self, salt: bytes, parent: IndexEntry | None, packed: bytes) -> IndexEntry | None:
        entry = self._by_digest.get(self._digest(parent.digest if parent else salt, packed))
        if entry is None:
            return None
        if not entry.stands_for(salt, parent, packed):
            self.collisions += 1
            return None
        return entry

    def _walk(self, salt: bytes, tokens: Sequence[int], blocks: int) -> IndexEntry | None:
        entry: IndexEntry | None = None
        for i in range(blocks):
            entry = self._find(salt, entry, self._packed(tokens, i * self._block_size))
            if entry is None:
                return None
        return entry

    def _drop(self, entry: IndexEntry) -> None:
        """Removes an entry and all below it: without their head they could never be matched again (PX-04)."""
        if entry.parent is not None:
            del entry.parent.children[entry.block]
        below = [entry]
        while below:
            gone = below.pop()
            below.extend(gone.children.values())
            del self._by_digest[gone.digest]
            del self._by_block[gone.block]
            self._pool.drop_from_index(gone.block)
        self.generation += 1
