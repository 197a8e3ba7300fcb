"""A request's block table: position p lives in block blocks[p // B] at offset p % B (F126).

blocks     [0 ........ count) [count ...... len)
             committed          reserved by the live step, if there is one
positions  [0 .. num_computed_tokens)          valid KV rows
           [num_computed_tokens .. count * B)  room that the request owns already
"""

from __future__ import annotations

from engine_actor.errors import ContractViolation
from engine_actor.memory.prefix_index import IndexEntry


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that hold `positions` token positions (F128)."""
    return -(-positions // block_size)


class Changes:
    """Counts every change of the tables that share it (F146)."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class BlockTable:
    """`epoch` changes whenever an entry that somebody may have copied is no longer true; plain growth keeps it.
    `forked`: another table may hold the partly filled last block; without it nobody else does. `indexed`: the
    prefix index's entry for the last block that was offered to it. `changes` moves whenever the boundary or the epoch
    is set: whoever compares it knows of every change without looking at a table."""

    __slots__ = (
        "_changes",
        "_epoch",
        "_num_computed_tokens",
        "block_size",
        "blocks",
        "count",
        "forked",
        "indexed",
        "resident",
    )

    def __init__(self, block_size: int, changes: Changes | None = None) -> None:
        self._changes = changes or Changes()
        self._num_computed_tokens = 0
        self._epoch = 0
        self.block_size = block_size
        self.blocks: list[int] = []
        self.count = 0
        self.forked = False
        self.indexed: IndexEntry | None = None
        self.resident = False

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, positions: int) -> None:
        self._num_computed_tokens = positions
        self._changes.count += 1

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._changes.count += 1

    def slot(self, position: int) -> int:
        """Physical slot of a position: block * B + offset (F127)."""
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def used_slots(self) -> list[int]:
        """Valid rows in each committed block, in table order."""
        size = self.block_size
        return [max(0, min(size, self.num_computed_tokens - i * size)) for i in range(self.count)]

    def check_integrity(self, name: object) -> None:
        if not 0 <= self.count <= len(self.blocks):
            raise ContractViolation(f"request {name}: {self.count} committed blocks of {len(self.blocks)}")
        if self.num_computed_tokens > self.count * self.block_size:
            raise ContractViolation(f"request {name}: {self.num_computed_tokens} positions in {self.count} blocks")
        if len(set(self.blocks)) != len(self.blocks):
            raise ContractViolation(f"request {name}: a block is listed twice in {self.blocks}")
