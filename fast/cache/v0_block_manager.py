"""Block managers of the fast V0 scheduler: stacks of free blocks, counted holders, tables in place.

The rules are those of ``BlockSpaceManagerV1`` and, for `NewerBlockManager`,
``BlockSpaceManagerV2`` of vLLM 0.5.1. A pool is two flat lists; tables are lists of block ids that
grow at the end. Taking or returning n blocks costs O(n), appending a slot O(1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig, V0SchedulingError

__all__ = ["BlockManager", "NewerBlockManager", "Pool"]

Moves = list[tuple[int, int]]


class Pool:
    """Blocks of one device.

    Parameters
    ----------
    stack : list of int
        All block ids; the last is given out first.

    Attributes
    ----------
    stack : list of int
        Free blocks.
    holders : list of int
        By block id.
    """

    __slots__ = ("holders", "stack")

    def __init__(self, stack: list[int]) -> None:
        self.stack = stack
        self.holders = [0] * len(stack)

    def take(self, count: int, holders: int = 1) -> list[int]:
        """Take at least one block, of which the caller knows that they are there."""
        blocks = self.stack[: -count - 1 : -1]
        del self.stack[-count:]
        for block in blocks:
            self.holders[block] = holders
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop one holder of each block, in order."""
        holders, stack = self.holders, self.stack
        for block in blocks:
            holders[block] -= 1
            if holders[block] == 0:
                stack.append(block)


class BlockManager:
    """The default block manager.

    Parameters
    ----------
    config : V0CacheConfig

    Attributes
    ----------
    gpu, cpu : Pool
    tables : dict of int to list of int
        GPU blocks by sequence id.
    swapped : dict of int to list of int
        CPU blocks by sequence id.
    """

    def __init__(self, config: V0CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.watermark = config.watermark_blocks
        self.gpu = Pool(self._initial_stack(config.num_gpu_blocks))
        self.cpu = Pool(self._initial_stack(config.num_cpu_blocks))
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}

    def _initial_stack(self, num_blocks: int) -> list[int]:
        return list(range(num_blocks))

    def can_allocate(self, num_tokens: int) -> AllocStatus:
        """Tell whether blocks for a whole prompt are to be had above the watermark."""
        needed = -(-num_tokens // self.block_size) + self.watermark
        if needed > self.config.num_gpu_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed <= len(self.gpu.stack) else AllocStatus.LATER

    def allocate(self, seq_id: int, num_tokens: int, num_seqs: int) -> None:
        """Give a waiting sequence its blocks; they count a holder for each sequence of its group.

        Finished siblings count too, whose share is then never returned.
        """
        count = -(-num_tokens // self.block_size)
        self.tables[seq_id] = self.gpu.take(count, num_seqs)

    def can_append(self, lengths: Collection[tuple[int, int]], lookahead: int) -> bool:
        """Tell whether every sequence, given as id and length, could take a fresh block."""
        return len(lengths) <= len(self.gpu.stack)

    def append(self, seq_id: int, num_tokens: int, lookahead: int, copies: Moves) -> None:
        """Give the newest token of a sequence its slot; a copy of a shared block is noted."""
        table = self.tables[seq_id]
        if len(table) * self.block_size < num_tokens:
            table += self.gpu.take(1)
        elif self.gpu.holders[table[-1]] != 1:
            self._unshare(table, len(table) - 1, self.gpu.take(1)[0], copies)

    def _unshare(self, table: list[int], index: int, fresh: int, copies: Moves) -> None:
        shared = table[index]
        table[index] = fresh
        self.gpu.give_back((shared,))
        copies.append((shared, fresh))

    def fork(self, parent: int, child: int) -> None:
        """Let a new sequence hold its parent's blocks."""
        table = self.tables[parent]
        self.tables[child] = table.copy()
        holders = self.gpu.holders
        for block in table:
            holders[block] += 1

    def free(self, seq_id: int) -> None:
        """Return a sequence's blocks, wherever they are."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.gpu.give_back(table)
            return
        table = self.swapped.pop(seq_id, None)
        if table is not None:
            self.cpu.give_back(table)

    def can_swap_in(self, seq_ids: Collection[int], lookahead: int) -> AllocStatus:
        """Tell whether a group can come back with a fresh block for each of its sequences."""
        return self._status(len(_union(self.swapped, seq_ids)) + len(seq_ids))

    def _status(self, needed: int) -> AllocStatus:
        if needed > self.config.num_gpu_blocks:
            return AllocStatus.NEVER
        enough = needed + self.watermark <= len(self.gpu.stack)
        return AllocStatus.OK if enough else AllocStatus.LATER

    def can_swap_out(self, seq_ids: Collection[int]) -> bool:
        """Tell whether the CPU pool has room for the distinct blocks of a group."""
        return len(_union(self.tables, seq_ids)) <= len(self.cpu.stack)

    def swap_in(self, seq_ids: Collection[int], moves: Moves) -> None:
        """Move sequences to the GPU and note which block went where."""
        self._move(seq_ids, self.swapped, self.cpu, self.tables, self.gpu, moves)

    def swap_out(self, seq_ids: Collection[int], moves: Moves) -> None:
        """Move sequences to the CPU and note which block went where."""
        self._move(seq_ids, self.tables, self.gpu, self.swapped, self.cpu, moves)

    def _move(
        self,
        seq_ids: Collection[int],
        origin: dict[int, list[int]],
        source: Pool,
        destination: dict[int, list[int]],
        target: Pool,
        moves: Moves,
    ) -> None:
        places: dict[int, int] = {}
        for seq_id in seq_ids:
            table = origin.pop(seq_id)
            moved = []
            for block in table:
                place = places.get(block)
                if place is None:
                    place = places[block] = target.take(1)[0]
                else:
                    target.holders[place] += 1
                moved.append(place)
            source.give_back(table)
            destination[seq_id] = moved
        moves += places.items()


class NewerBlockManager(BlockManager):
    """The newer block manager, which counts slots and knows lookahead slots.

    Attributes
    ----------
    slots : dict of int to int
        Tokens of each sequence that were given a slot.
    """

    def __init__(self, config: V0CacheConfig) -> None:
        super().__init__(config)
        self.slots: dict[int, int] = {}

    def _initial_stack(self, num_blocks: int) -> list[int]:
        return list(range(num_blocks - 1, -1, -1))

    def allocate(self, seq_id: int, num_tokens: int, num_seqs: int) -> None:
        """Give a waiting sequence its blocks."""
        super().allocate(seq_id, num_tokens, 1)
        self.slots[seq_id] = num_tokens

    def can_append(self, lengths: Collection[tuple[int, int]], lookahead: int) -> bool:
        """Tell whether there is a free block for each block that new slots touch."""
        size, touched = self.block_size, 0
        for seq_id, num_tokens in lengths:
            first = self.slots[seq_id] // size
            end = num_tokens + lookahead
            touched += max(1, -(-end // size) - first)
        return touched <= len(self.gpu.stack)

    def append(self, seq_id: int, num_tokens: int, lookahead: int, copies: Moves) -> None:
        """Give new tokens and lookahead slots their blocks; copies of shared blocks are noted."""
        size, table = self.block_size, self.tables[seq_id]
        while len(table) * size < num_tokens + lookahead:
            table.append(self._take_one(self.gpu, seq_id))
        start = self.slots[seq_id] // size
        if start >= len(table):
            raise V0SchedulingError(
                "append_past_table", f"sequence {seq_id} appends nothing behind a full last block"
            )
        for index in range(start, max(start + 1, -(-num_tokens // size))):
            if self.gpu.holders[table[index]] > 1:
                self._unshare(table, index, self._take_one(self.gpu, seq_id), copies)
        self.slots[seq_id] = num_tokens

    def _take_one(self, pool: Pool, seq_id: int) -> int:
        if not pool.stack:
            raise V0SchedulingError("pool_exhausted", f"no block is left for sequence {seq_id}")
        return pool.take(1)[0]

    def fork(self, parent: int, child: int) -> None:
        """Let a new sequence hold its parent's blocks."""
        super().fork(parent, child)
        self.slots[child] = self.slots[parent]

    def free(self, seq_id: int) -> None:
        """Return a sequence's blocks, wherever they are."""
        super().free(seq_id)
        self.slots.pop(seq_id, None)

    def can_swap_in(self, seq_ids: Collection[int], lookahead: int) -> AllocStatus:
        """Tell whether a group can come back, lookahead slots of its open blocks counted."""
        if lookahead == 0:
            return self._status(len(_union(self.swapped, seq_ids)))
        size = self.block_size
        closed: set[int] = set()
        opened = 0
        for seq_id in seq_ids:
            table = self.swapped[seq_id]
            num_closed = min(len(table), self.slots[seq_id] // size)
            closed.update(table[:num_closed])
            for index in range(num_closed, len(table)):
                room = min(size, (index + 1) * size - self.slots[seq_id])
                opened += max(1, -((room - lookahead) // size))
        return self._status(opened + len(closed))

    def _move(
        self,
        seq_ids: Collection[int],
        origin: dict[int, list[int]],
        source: Pool,
        destination: dict[int, list[int]],
        target: Pool,
        moves: Moves,
    ) -> None:
        for seq_id in seq_ids:
            table = origin.pop(seq_id)
            source.give_back(table)
            destination[seq_id] = moved = [self._take_one(target, seq_id) for _ in table]
            moves += zip(table, moved, strict=True)


def _union(tables: dict[int, list[int]], seq_ids: Collection[int]) -> set[int]:
    return set().union(*(tables[seq_id] for seq_id in seq_ids))
