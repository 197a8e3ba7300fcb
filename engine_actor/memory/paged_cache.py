"""Who owns which KV block: the block tables of all resident requests over one pool.

Tables are kept in resident order. A table enters the dictionary when a step reserves for it, so that publishing a step
only flips its `resident` flag (F147, F165: publishing grows no container).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine_actor.errors import ContractViolation
from engine_actor.memory.block_pool import BlockPool
from engine_actor.memory.block_table import BlockTable, Changes, blocks_for
from engine_actor.memory.reservation import Reservation, RowDemand, RowReservation


class _Tables(dict[int, BlockTable]):
    """Tables by request, in resident order; one that comes, goes or is replaced moves the count of changes."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = changes

    def __setitem__(self, request_id: int, table: BlockTable) -> None:
        self._changes.count += 1
        super().__setitem__(request_id, table)

    def __delitem__(self, request_id: int) -> None:
        self._changes.count += 1
        super().__delitem__(request_id)


class PagedCache:
    """`make_room(k)` is asked to bring the pool's free count to k, where idle blocks can be given up for it."""

    def __init__(self, pool: BlockPool, block_size: int, make_room: Callable[[int], None] = lambda _: None) -> None:
        self.pool = pool
        self._make_room = make_room
        self.block_size = block_size
        self._changes = Changes()
        self._tables = _Tables(self._changes)
        self._live: Reservation | None = None

    # -- questions ------------------------------------------------------------------------------------------------

    def table(self, request_id: int) -> BlockTable | None:
        """The table of a resident request."""
        table = self._tables.get(request_id)
        return table if table is not None and table.resident else None

    def residents(self) -> list[int]:
        """Ids of resident requests, in the order in which they became resident."""
        return [request_id for request_id, table in self._tables.items() if table.resident]

    def tables(self) -> Iterator[tuple[int, BlockTable]]:
        """Residents with their tables, in order."""
        return ((request_id, table) for request_id, table in self._tables.items() if table.resident)

    @property
    def resident_count(self) -> int:
        provisional = sum(row.demand.new for row in self._live.rows) if self._live else 0
        return len(self._tables) - provisional

    def is_committed_row(self, request_id: int, position: int) -> bool:
        """Whether the keys and values of a position may be read as valid: the request is resident and owns the block,
        the position is committed, and no copy that fills the block is still to be made (F354)."""
        table = self.table(request_id)
        if table is None or not 0 <= position < table.num_computed_tokens:
            return False
        at = position // self.block_size
        if not self.pool.owner_count(table.blocks[at]):
            return False
        copying = self._live.rows if self._live else ()
        return not any(row.copy and row.table is table and row.tail == at for row in copying)

    @property
    def changes(self) -> int:
        """Moves with every change of the pool and of any table: if it is the same, nothing was issued or given back,
        and no table was replaced, remapped or advanced in between, those outside the step included (F146)."""
        return self.pool.generation + self._changes.count

    def must_copy_tail(self, table: BlockTable) -> bool:
        """The next write goes into a partly filled block that somebody else holds too (C17: only then it is copied)."""
        if not table.forked:
            return False
        at, offset = divmod(table.num_computed_tokens, self.block_size)
        return offset != 0 and self.pool.owner_count(table.blocks[at]) > 1

    def growth(self, table: BlockTable, positions: int) -> int:
        """Blocks that the pool must issue so that `positions` can be written: what the table lacks (F105), and one for
        a private copy of a shared tail."""
        lacking = blocks_for(positions, self.block_size) - table.count
        return (lacking if lacking > 0 else 0) + (table.forked and self.must_copy_tail(table))

    def blocks_to_add(self, demand: RowDemand) -> int:
        """As `growth`, for a new row too, which brings the blocks that it adopts."""
        positions = max(demand.length, demand.target)
        table = self.table(demand.request_id)
        if table is None:
            return blocks_for(positions, self.block_size) - len(demand.adopted)
        return self.growth(table, positions)

    # -- a step ---------------------------------------------------------------------------------------------------

    def reserve(self, demands: Sequence[RowDemand]) -> Reservation:
        """Takes all blocks of a step, or raises and changes nothing.

        Raises OutOfBlocks, or ContractViolation where the plan does not fit the tables (F111, F112, F140, F151).
        """
        if self._live is not None:
            raise ContractViolation("a second reservation while one is live")
        if len({demand.request_id for demand in demands}) != len(demands):
            raise ContractViolation(f"a request is twice in one step: {[demand.request_id for demand in demands]}")
        needs = [self._checked_need(demand) for demand in demands]
        total = sum(needs)
        pinned: list[int] = []
        try:
            for demand in demands:
                for block in demand.adopted:
                    self.pool.pin(block)  # first, so that making room does not take them
                    pinned.append(block)
            self._make_room(total)
            fresh = iter(self.pool.allocate(total))
        except BaseException:
            for block in reversed(pinned):
                self.pool.free([block])
            raise
        rows = [self._grow(demand, need, fresh) for demand, need in zip(demands, needs, strict=True)]
        assert next(fresh, None) is None
        self._live = Reservation(self, rows)
        return self._live

    def _grow(self, demand: RowDemand, need: int, fresh: Iterator[int]) -> RowReservation:
        if demand.new:
            table = self._tables[demand.request_id] = BlockTable(self.block_size, self._changes)
            table.blocks.extend(demand.adopted)
            row = RowReservation(demand, table, 0)
        else:
            table = self._tables[demand.request_id]
            row = RowReservation(demand, table, table.count)
            if not need:
                return row
            if self.must_copy_tail(table):
                row.tail = table.num_computed_tokens // self.block_size
                row.copy = (table.blocks[row.tail], next(fresh))
                table.blocks[row.tail] = row.copy[1]
                table.epoch += 1
                need -= 1
        table.blocks.extend(next(fresh) for _ in range(need))
        return row

    def _checked_need(self, demand: RowDemand) -> int:
        """Blocks that the row needs. Raises ContractViolation where it does not fit the tables."""
        name = demand.request_id
        table = self._tables.get(name)
        if demand.new is not (table is None):
            raise ContractViolation(
                f"request {name} is marked {'new but is resident' if demand.new else 'resident but is not'}"
            )
        valid = len(demand.adopted) * self.block_size if table is None else table.num_computed_tokens
        if demand.num_computed_tokens != valid:
            raise ContractViolation(f"request {name}: plan says {demand.num_computed_tokens}, table {valid}")
        if demand.target < valid:
            raise ContractViolation(f"request {name}: target {demand.target} < committed {valid}")
        positions = demand.length if demand.length > demand.target else demand.target
        if table is None:
            return blocks_for(positions, self.block_size) - len(demand.adopted)
        if demand.adopted:
            raise ContractViolation(f"request {name} is resident and cannot adopt blocks")
        return self.growth(table, positions)

    def is_live(self, reservation: Reservation) -> bool:
        return self._live is reservation

    def end_reservation(self, reservation: Reservation) -> None:
        assert self._live is reservation
        self._live = None

    def drop_provisional(self, request_id: int) -> None:
        """Forgets the table of a row that never became resident."""
        assert not self._tables[request_id].resident
        del self._tables[request_id]

    # -- between steps --------------------------------------------------------------------------------------------

    def owns(self, request_id: int) -> bool:
        return self.table(request_id) is not None

    def remove(self, request_id: int) -> None:
        """Releases a resident's blocks, tail first; shared ones survive with their other owners (F342)."""
        self._refuse_during_step()
        table = self._tables[request_id]
        del self._tables[request_id]
        self.pool.free(table.blocks[::-1])

    def truncate(self, request_id: int, positions: int) -> int:
        """Keeps at most `positions` valid positions and returns how many stay valid.

        Blocks behind them go back. Where the block that would be written next is shared or indexed, the boundary
        falls to the start of that block: less than a block is recomputed and nothing is copied.
        """
        self._refuse_during_step()
        table = self._tables[request_id]
        length = min(positions, table.num_computed_tokens)
        if length % self.block_size and self.pool.owner_count(table.blocks[length // self.block_size]) > 1:
            length -= length % self.block_size
        keep_blocks = blocks_for(length, self.block_size)
        surplus = table.blocks[keep_blocks:]
        del table.blocks[keep_blocks:]
        self.pool.free(surplus[::-1])
        table.count = keep_blocks
        table.num_computed_tokens = length
        table.indexed = None
        table.epoch += 1
        return length

    def fork(self, parent_id: int, child_id: int, positions: int) -> int:
        """The child becomes a resident that shares the parent's blocks of its first `positions` (F343); returns how
        many of them are valid for it. A partly filled last block is copied when one of the two first writes into it.
        Where the index holds that block, which is then full, the child starts at the block, as in `truncate`: so a
        block that is still written to is never indexed.
        """
        self._refuse_during_step()
        parent = self._tables[parent_id]
        assert 0 < positions <= parent.num_computed_tokens and child_id not in self._tables
        if positions % self.block_size and self.pool.is_indexed(parent.blocks[positions // self.block_size]):
            positions -= positions % self.block_size
        child = BlockTable(self.block_size, self._changes)
        for block in parent.blocks[: blocks_for(positions, self.block_size)]:
            self.pool.pin(block)
            child.blocks.append(block)
        child.forked = parent.forked = True
        child.count = len(child.blocks)
        child.num_computed_tokens = positions
        child.resident = True
        self._tables[child_id] = child
        return positions

    def _refuse_during_step(self) -> None:
        if self._live is not None:
            raise ContractViolation("a table cannot change while a step holds a reservation")

    # -- integrity ------------------------------------------------------------------------------------------------

    def holders(self) -> Iterator[tuple[int, int]]:
        """(block, 1) for each entry of each table, reserved ones included, and for each pinned copy source."""
        for table in self._tables.values():
            for block in table.blocks:
                yield block, 1
        for row in self._live.rows if self._live else ():
            if row.copy:
                yield row.copy[0], 1

    def check_integrity(self) -> None:
        """Every table is sound and every block's owner count is what the tables add up to. Linear (F188)."""
        for request_id, table in self._tables.items():
            table.check_integrity(request_id)
            if self._live is None and (len(table.blocks) != table.count or not table.resident):
                raise ContractViolation(f"request {request_id} holds reserved blocks and no step is live")
        self.pool.check_integrity(self.holders())
        for request_id, table in self._tables.items():
            if self._shares_unmarked_tail(table):
                raise ContractViolation(f"request {request_id}: its last block has other owners, and it is no fork")

    def _shares_unmarked_tail(self, table: BlockTable) -> bool:
        at, offset = divmod(table.num_computed_tokens, self.block_size)
        return offset != 0 and not table.forked and self.pool.owner_count(table.blocks[at]) > 1
