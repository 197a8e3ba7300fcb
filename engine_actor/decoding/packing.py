"""A plan becomes one PackedStep: ragged rows laid end to end, without padding (F100, F233).

Block tables are mirrored in one int32 matrix, so that a step copies only the entries that are new since the last one.
"""

from __future__ import annotations

import numpy as np

from engine_actor.decoding.decoder import Int32, PackedStep
from engine_actor.memory.block_table import BlockTable
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.memory.step_reservation import StepReservation
from engine_actor.scheduling.step_plan import StepPlan

NOWHERE: tuple[int, BlockTable | None, int, int] = (-1, None, 0, 0)


class TableMirror:
    """Rows of the matrix by request; `sync` brings one up to date and returns its index."""

    def __init__(self, columns: int) -> None:
        self._matrix = np.full((16, columns), -1, np.int32)
        self._free = list(range(16))
        self._rows: dict[int, tuple[int, BlockTable | None, int, int]] = {}  # index, table, epoch, entries copied

    def sync(self, request_id: int, table: BlockTable) -> int:
        index, mirrored, epoch, copied = self._rows.get(request_id, NOWHERE)
        total = len(table.blocks)
        if mirrored is table and epoch == table.epoch and copied == total:
            return index
        if index < 0:
            index = self._take_row()
        if mirrored is not table or epoch != table.epoch:
            self._matrix[index] = -1
            copied = 0
        self._matrix[index, copied:total] = table.blocks[copied:]
        self._rows[request_id] = (index, table, table.epoch, total)
        return index

    def gather(self, indices: list[int], columns: int) -> Int32:
        return self._matrix[indices, :columns]

    def forget_all_but(self, cache: CacheManager) -> None:
        """Frees the rows of requests that are no longer resident."""
        for request_id in [name for name in self._rows if cache.table(name) is None]:
            self._free.append(self._rows.pop(request_id)[0])

    @property
    def size(self) -> int:
        return len(self._rows)

    def _take_row(self) -> int:
        if not self._free:
            rows = len(self._matrix)
            grown = np.full((2 * rows, self._matrix.shape[1]), -1, np.int32)
            grown[:rows] = self._matrix
            self._matrix = grown
            self._free = list(range(rows, 2 * rows))
        return self._free.pop()


class StepPacker:
    """`columns`: blocks of the longest sequence."""

    def __init__(self, cache: CacheManager, columns: int) -> None:
        self._cache = cache
        self._mirror = TableMirror(columns)

    def pack(self, plan: StepPlan, reservation: StepReservation) -> PackedStep:
        """Arrays for `plan.rows`, in their order; tables show committed blocks followed by reserved ones (F136)."""
        rows = plan.rows
        if self._mirror.size > 2 * self._cache.max_residents:
            self._mirror.forget_all_but(self._cache)
        input_ids: list[int] = []
        logits_rows: list[int] = []
        for row in rows:
            ids, past_length = row.record.history.ids, row.demand.num_computed_tokens
            if row.count == 1:  # nearly always
                input_ids.append(ids[past_length])
            else:
                input_ids += ids[past_length : row.demand.target - len(row.drafts)]
                input_ids += row.drafts
            if row.drafts:
                logits_rows += row.logits_rows
            elif row.samples:
                logits_rows.append(row.offset + row.count - 1)
        counts = np.array([row.count for row in rows], np.int32)
        past = np.array([row.demand.num_computed_tokens for row in rows], np.int32)
        cumulative = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=cumulative[1:])
        # Position of a packed token: past of its row + its offset in the row.
        positions = np.arange(plan.token_count, dtype=np.int64)
        positions += np.repeat(past - cumulative[:-1], counts)
        tables = [reserved.table for reserved in reservation.rows]
        indices = [self._mirror.sync(row.record.id, table) for row, table in zip(rows, tables, strict=True)]
        longest = int((past + counts).max())
        columns = max(len(table.blocks) for table in tables)
        states = reservation.state_slots
        return PackedStep(
            input_ids=np.array(input_ids, np.int64),
            position_ids=positions,
            cumulative_sequence_lengths=cumulative,
            past_sequence_lengths=past,
            block_table=self._mirror.gather(indices, columns),
            attention_metadata=np.array([int(counts.max()), longest, longest], np.int32),
            logits_rows=np.array(logits_rows, np.int64),
            block_copies=reservation.copies,
            state_slots=None if states is None else np.array(states, np.int32),
            windowed_table=self._windowed_table(plan, columns),
        )

    def _windowed_table(self, plan: StepPlan, columns: int) -> Int32 | None:
        """Column j of a row is block j mod R of its ring; as wide as the block table."""
        windows = self._cache.windows
        if windows is None:
            return None
        rings = np.array([windows.blocks(row.record.id) for row in plan.rows], np.int32)
        return rings[:, np.arange(columns) % windows.ring_size]
