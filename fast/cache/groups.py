"""Block tables of one group of layers: how many blocks a request needs, holds and gives back.

Sources: ``SingleTypeKVCacheManager``, ``FullAttentionManager`` and ``MambaManager`` of
``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import NULL_BLOCK, BlockPool, IntArray
from servespec.fast.cache.prefix import group_key

__all__ = ["NO_PLACE", "UNLIMITED", "BlockGroup", "FullAttentionGroup", "GdnGroup"]

UNLIMITED = 1 << 60
"""Room of a request that needs no block ever again."""

NO_PLACE = -1
"""Place of a block that is not there, and what a freed row of a table holds."""


class BlockGroup:
    """A group whose requests hold every block until they end.

    Parameters
    ----------
    index : int
        The group's place among all groups.
    block_size : int
        Tokens in one block.
    hash_block_size : int
        Tokens in one hash.
    pool : BlockPool
    capacity : int
        Slots.
    width : int
        Most blocks of one request.

    Attributes
    ----------
    table : array of int32, shape (capacity, width)
        Block ids of each slot; only the first `counts` of a row mean anything.
    counts : array of int64, shape (capacity,)
        Blocks held.
    num_cached : array of int64, shape (capacity,)
        Leading blocks that need no hash any more.
    copies : list of (int, int)
        Copies (source, destination) asked for in this step; both blocks have an extra holder.
    new_ids : list of int
        Blocks the worker has to clear.
    """

    def __init__(
        self,
        index: int,
        block_size: int,
        hash_block_size: int,
        pool: BlockPool,
        capacity: int,
        width: int,
    ) -> None:
        self.index = index
        self.block_size = block_size
        self.hash_block_size = hash_block_size
        self.pool = pool
        self.table: npt.NDArray[np.int32] = np.zeros((capacity, width), dtype=np.int32)
        self.counts: IntArray = np.zeros(capacity, dtype=np.int64)
        self.num_cached: IntArray = np.zeros(capacity, dtype=np.int64)
        self.copies: list[tuple[int, int]] = []
        self.new_ids: list[int] = []
        # Hits that end inside a block, until the request has its own copy: (place, block).
        self._partial_hits: dict[int, tuple[int, int]] = {}

    def grow(self, capacity: int) -> None:
        """Make room for more slots."""
        old = len(self.counts)
        table = np.zeros((capacity, self.table.shape[1]), dtype=np.int32)
        table[:old] = self.table
        self.table = table
        self.counts = np.concatenate([self.counts, np.zeros(capacity - old, dtype=np.int64)])
        self.num_cached = np.concatenate(
            [self.num_cached, np.zeros(capacity - old, dtype=np.int64)]
        )

    def new_step(self) -> None:
        """Forget what holds for one step only."""

    def block_ids(self, slot: int) -> list[int]:
        """Return the blocks of a request, nulls included."""
        ids: list[int] = self.table[slot, : self.counts[slot]].tolist()
        return ids

    def demand(
        self, slot: int, num_slots: int, num_main: int, hits: Sequence[int], num_hit: int
    ) -> int:
        """Count the blocks that the free queue would lose.

        Parameters
        ----------
        slot : int
        num_slots : int
            Tokens that need a place, lookahead included.
        num_main : int
            The same without lookahead.
        hits : sequence of int
            Blocks of a prefix hit.
        num_hit : int
            Computed tokens after the hit.
        """
        required = -(-num_slots // self.block_size)
        missing = max(required - len(hits) - int(self.counts[slot]), 0)
        return missing + self.pool.num_evictable(hits) + self._ends_inside(hits, num_hit)

    def adopt(self, slot: int, hits: Sequence[int], num_hit: int) -> None:
        """Give a request without blocks those of a prefix hit of `num_hit` tokens."""
        self.pool.touch([block for block in hits if block != NULL_BLOCK])
        self._append(slot, hits)
        self.num_cached[slot] = len(hits)
        if self._ends_inside(hits, num_hit):
            place = num_hit // self.block_size
            self._partial_hits[slot] = (place, hits[-1])
            self.num_cached[slot] = place

    def allocate(self, slot: int, num_slots: int, num_main: int) -> list[int]:
        """Give a request the blocks that `demand` counted and return those to be reported."""
        own_copy = []
        if slot in self._partial_hits:
            place, source = self._partial_hits.pop(slot)
            own_copy = self.pool.allocate(1).tolist()
            self._redirect(slot, place, source, own_copy[0])
            self.new_ids.extend(own_copy)
        missing = -(-num_slots // self.block_size) - int(self.counts[slot])
        if missing <= 0:
            return own_copy
        blocks: list[int] = self.pool.allocate(missing).tolist()
        self._append(slot, blocks)
        self._note_new(blocks)
        return own_copy + blocks

    def skip(self, slot: int, num_processed: int) -> None:
        """Give back blocks that no later token will read.

        Parameters
        ----------
        num_processed : int
            Tokens whose step is over.
        """

    def room(self, slots: IntArray, num_lookahead: int, max_model_len: int) -> IntArray:
        """Return the tokens (without lookahead) up to which `allocate` does nothing.

        Parameters
        ----------
        slots : array of int64, shape (n,)
        num_lookahead, max_model_len : int

        Returns
        -------
        array of int64, shape (n,)
        """
        places = self.counts[slots] * self.block_size
        # Places beyond the longest sequence are never asked for.
        return np.where(places >= max_model_len, UNLIMITED, places - num_lookahead)

    def missing(self, slots: IntArray, num_slots: IntArray, num_main: IntArray) -> IntArray:
        """Count the blocks that running requests lack.

        Parameters
        ----------
        slots : array of int64, shape (n,)
        num_slots, num_main : array of int64, shape (n,)
            As in `demand`.

        Returns
        -------
        array of int64, shape (n,)
        """
        lacking: IntArray = -(-num_slots // self.block_size) - self.counts[slots]
        return np.maximum(lacking, 0, out=lacking)

    def append_each(self, slots: IntArray, blocks: IntArray) -> None:
        """Give each request one block at the end of its table."""
        counts = self.counts[slots]
        if int(counts.max()) >= self.table.shape[1]:
            self._widen(int(counts.max()) + 1)
        self.table[slots, counts] = blocks
        self.counts[slots] = counts + 1
        self._note_new(blocks.tolist())

    def cache(
        self, slot: int, num_tokens: int, end: int, num_prompt: int, hashes: Sequence[bytes]
    ) -> list[int]:
        """Enter the full blocks of the first `num_tokens` tokens in the pool's index.

        Parameters
        ----------
        slot : int
        num_tokens : int
            Tokens that are known and will have been computed.
        end : int
            Tokens at the end of the chunk just scheduled, known or not; -1 if none was.
        num_prompt : int
            Length of the prompt, whose last hash boundary may become a partial entry.
        hashes : sequence of bytes
            The request's hashes, of `hash_block_size` tokens each.

        Returns
        -------
        list of int
            The blocks that got a key.
        """
        entered: list[int] = []
        first, last = int(self.num_cached[slot]), num_tokens // self.block_size
        if first >= last:
            return entered
        scale = self.block_size // self.hash_block_size
        for place in range(first, last):
            block = int(self.table[slot, place])
            if block == NULL_BLOCK:
                continue
            # A block that has a key already was entered half full.
            self.pool.drop_keys(block)
            key = group_key(hashes[(place + 1) * scale - 1], self.index)
            self.pool.add_key(block, key, (place + 1) * self.block_size)
            entered.append(block)
        self.num_cached[slot] = last
        return entered

    def free(self, slot: int) -> None:
        """Take all blocks from a request, the last one first in line for reuse."""
        count = int(self.counts[slot])
        if count:
            self.pool.release(self.table[slot, :count][::-1].astype(np.int64))
        self.table[slot, :count] = NO_PLACE
        self.counts[slot] = 0
        self.num_cached[slot] = 0
        self._partial_hits.pop(slot, None)

    def num_common_prefix(self, slot: int, num_holders: int) -> int:
        """Count the leading blocks of a request that all `num_holders` requests hold."""
        return 0

    def _append(self, slot: int, blocks: Sequence[int]) -> None:
        count = int(self.counts[slot])
        end = count + len(blocks)
        if end > self.table.shape[1]:
            self._widen(end)
        self.table[slot, count:end] = blocks
        self.counts[slot] = end

    def _widen(self, width: int) -> None:
        wider = np.zeros((len(self.counts), 2 * width), dtype=np.int32)
        wider[:, : self.table.shape[1]] = self.table
        self.table = wider

    def _note_new(self, blocks: Sequence[int]) -> None:
        """Remember blocks for clearing, if the worker clears those of this group."""

    def _ends_inside(self, hits: Sequence[int], num_hit: int) -> bool:
        return len(hits) > 0 and num_hit % self.block_size != 0

    def _redirect(self, slot: int, place: int, source: int, copy: int) -> None:
        """Put a private copy in place of a shared block and keep both until it is made."""
        self.table[slot, place] = copy
        self.copies.append((source, copy))
        # The holder that the request was for the source now stands for the copy order.
        self.pool.ref_counts[copy] += 1

    def _enter_partial(
        self, slot: int, num_tokens: int, hashes: Sequence[bytes], entered: list[int]
    ) -> bytes | None:
        """Make the block of a prefix that ends inside it reachable; return the key."""
        place = num_tokens // self.block_size
        if place >= self.counts[slot]:
            return None
        block = int(self.table[slot, place])
        if block == NULL_BLOCK:
            return None
        key = group_key(hashes[num_tokens // self.hash_block_size - 1], self.index)
        if not self.pool.holds_key(block, key) and 0 < self.pool.key_tokens(block) < num_tokens:
            self.pool.drop_keys(block)
        if self.pool.add_key(block, key, num_tokens):
            entered.append(block)
        return key


class FullAttentionGroup(BlockGroup):
    """Full-attention layers: a block for every `block_size` tokens."""

    def __init__(
        self,
        index: int,
        block_size: int,
        hash_block_size: int,
        pool: BlockPool,
        capacity: int,
        width: int,
        *,
        clears_blocks: bool,
    ) -> None:
        super().__init__(index, block_size, hash_block_size, pool, capacity, width)
        self.clears_blocks = clears_blocks

    def cache(
        self, slot: int, num_tokens: int, end: int, num_prompt: int, hashes: Sequence[bytes]
    ) -> list[int]:
        """Enter full blocks and, with fine hashes, the tail of the prompt."""
        entered = super().cache(slot, num_tokens, end, num_prompt, hashes)
        boundary = num_prompt // self.hash_block_size * self.hash_block_size
        if boundary <= num_tokens and boundary % self.block_size != 0:
            self._enter_partial(slot, boundary, hashes, entered)
        return entered

    def num_common_prefix(self, slot: int, num_holders: int) -> int:
        """Count the leading blocks of a request that all `num_holders` requests hold."""
        row = self.table[slot, : self.counts[slot]]
        if len(row) == 0 or self.pool.ref_counts[row[0]] != num_holders:
            return 0
        differs = self.pool.ref_counts[row] != num_holders
        return int(differs.argmax()) if differs.any() else len(row)

    def _note_new(self, blocks: Sequence[int]) -> None:
        if self.clears_blocks:
            self.new_ids.extend(blocks)


class GdnGroup(BlockGroup):
    """GDN layers in mode ``none``: one state block and one for each draft, for life."""

    def __init__(
        self,
        index: int,
        block_size: int,
        hash_block_size: int,
        pool: BlockPool,
        capacity: int,
        num_spec_blocks: int,
    ) -> None:
        super().__init__(index, block_size, hash_block_size, pool, capacity, 1 + num_spec_blocks)
        self.num_spec_blocks = num_spec_blocks

    def demand(
        self, slot: int, num_slots: int, num_main: int, hits: Sequence[int], num_hit: int
    ) -> int:
        """Count missing blocks; drafts need a block each, whatever the length."""
        return super().demand(slot, self._with_drafts(num_slots), num_main, hits, num_hit)

    def allocate(self, slot: int, num_slots: int, num_main: int) -> list[int]:
        """Give a request its state blocks."""
        return super().allocate(slot, self._with_drafts(num_slots), num_main)

    def room(self, slots: IntArray, num_lookahead: int, max_model_len: int) -> IntArray:
        """Return the tokens up to which `allocate` does nothing: as many as there may be."""
        return np.full(len(slots), UNLIMITED)

    def missing(self, slots: IntArray, num_slots: IntArray, num_main: IntArray) -> IntArray:
        """Count the blocks that running requests lack: none."""
        return np.zeros(len(slots), dtype=np.int64)

    def _with_drafts(self, num_slots: int) -> int:
        return num_slots + self.block_size * self.num_spec_blocks
