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

__all__ = ["UNLIMITED", "AlignedGdnGroup", "BlockGroup", "FullAttentionGroup", "GdnGroup"]

UNLIMITED = 1 << 60
"""Room of a request that needs no block ever again."""

_NONE = -1


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

    def room(self, slot: int, num_lookahead: int, max_model_len: int) -> int:
        """Return the number of tokens (without lookahead) up to which `allocate` does nothing."""
        slots = int(self.counts[slot]) * self.block_size
        # Places beyond the longest sequence are never asked for.
        return UNLIMITED if slots >= max_model_len else slots - num_lookahead

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
            Tokens that will have been computed, known or not.
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
        self.table[slot, :count] = _NONE
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
            wider = np.zeros((len(self.counts), 2 * end), dtype=np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        self.table[slot, count:end] = blocks
        self.counts[slot] = end

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

    def room(self, slot: int, num_lookahead: int, max_model_len: int) -> int:
        """Return the number of tokens up to which `allocate` does nothing."""
        return UNLIMITED if self.counts[slot] else 0

    def _with_drafts(self, num_slots: int) -> int:
        return num_slots + self.block_size * self.num_spec_blocks


class AlignedGdnGroup(BlockGroup):
    """GDN layers in mode ``align``: a state at every block boundary, kept for prefix hits.

    A request's running state lives in its last block (before the blocks of its drafts), and the
    tables are padded with nulls so that block i stands for the state after i + 1 blocks of
    tokens. The state two blocks back is given up as soon as no step in flight reads it.
    """

    def __init__(
        self,
        index: int,
        block_size: int,
        hash_block_size: int,
        pool: BlockPool,
        capacity: int,
        width: int,
        num_spec_blocks: int,
        *,
        publishes_overwritten: bool,
    ) -> None:
        super().__init__(index, block_size, hash_block_size, pool, capacity, width)
        self.num_spec_blocks = num_spec_blocks
        self.publishes_overwritten = publishes_overwritten
        # Keys whose states are only written in this step: no other request may start from them.
        self._cached_this_step: set[bytes] = set()
        self._last_state: IntArray = np.full(capacity, _NONE, dtype=np.int64)
        self._allocated: npt.NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)

    def grow(self, capacity: int) -> None:
        """Make room for more slots."""
        super().grow(capacity)
        more = capacity - len(self._last_state)
        self._last_state = np.concatenate([self._last_state, np.full(more, _NONE, dtype=np.int64)])
        self._allocated = np.concatenate([self._allocated, np.zeros(more, dtype=np.bool_)])

    def new_step(self) -> None:
        """Let states cached in the previous step be used."""
        self._cached_this_step.clear()

    def demand(
        self, slot: int, num_slots: int, num_main: int, hits: Sequence[int], num_hit: int
    ) -> int:
        """Count the blocks that the free queue would lose.

        Drafts are counted in blocks, not in tokens, and lookahead not at all: a token beyond the
        boundary would break the alignment. The result is not clamped at 0 (vLLM's is not), so a
        surplus here makes up for a lack in another group.
        """
        if hits and self.pool.key(hits[-1]) in self._cached_this_step:
            # More than the pool has: wait for the next step.
            return self.pool.num_blocks + 1
        missing = self._num_required(num_main) - len(hits) - int(self.counts[slot])
        partial = self._ends_inside(hits, num_hit) or slot in self._partial_hits
        if partial:
            missing = max(missing, 0) + 1
        if missing > 0:
            missing = 1 + partial
            if not self._allocated[slot]:
                missing += self.num_spec_blocks
        return missing + self.pool.num_evictable(hits)

    def allocate(self, slot: int, num_slots: int, num_main: int) -> list[int]:
        """Move the draft blocks to the new end, pad with nulls and add what is missing."""
        required = self._num_required(num_main)
        held = int(self.counts[slot])
        partial = self._partial_hits.pop(slot, None)
        if required <= held and partial is None:
            return []
        drafts = self.num_spec_blocks
        running = bool(self._allocated[slot])
        if running:
            self._last_state[slot] = held - 1 - drafts
        elif held > 0:
            self._last_state[slot] = held - 1
        state = required - drafts - 1
        self._append(slot, [NULL_BLOCK] * (state - held))
        if running:
            for place in range(held - drafts, min(held, state)):
                self._append(slot, [int(self.table[slot, place])])
                self.table[slot, place] = NULL_BLOCK
        missing = required - int(self.counts[slot])
        if partial is not None:
            missing = max(missing, 0) + 1
        new: list[int] = self.pool.allocate(missing).tolist()
        reported: list[int] = self.table[slot, held : self.counts[slot]].tolist()
        if partial is not None:
            place, source = partial
            copy = new.pop(0)
            if running:
                # The worker's table only grows, so the request stays on the source and the index
                # moves to the copy, which is made before this step overwrites the source.
                self.pool.move_keys(source, copy)
                self.copies.append((source, copy))
                self.pool.ref_counts[source] += 1
                key = self.pool.key(copy)
                if key is not None:
                    self._cached_this_step.add(key)
            else:
                self._redirect(slot, place, source, copy)
                reported.insert(0, copy)
        self._append(slot, new)
        self._allocated[slot] = True
        return reported + new

    def skip(self, slot: int, num_processed: int) -> None:
        """Give up states before the one that `num_processed` tokens end in."""
        current = (num_processed - 1) // self.block_size
        row = self.table[slot]
        freed = []
        # Everything below an earlier null was given up before.
        for place in range(min(current, int(self.counts[slot])) - 1, -1, -1):
            if row[place] == NULL_BLOCK:
                break
            freed.append(int(row[place]))
            row[place] = NULL_BLOCK
        if freed:
            self.pool.release(np.array(freed, dtype=np.int64))
        last = int(self._last_state[slot])
        if last != _NONE and last < current and row[last] != NULL_BLOCK:
            self.pool.release(row[last : last + 1].astype(np.int64))
            row[last] = NULL_BLOCK

    def room(self, slot: int, num_lookahead: int, max_model_len: int) -> int:
        """Return the number of tokens up to which `allocate` does nothing."""
        return (int(self.counts[slot]) - self.num_spec_blocks) * self.block_size

    def cache(
        self, slot: int, num_tokens: int, end: int, num_prompt: int, hashes: Sequence[bytes]
    ) -> list[int]:
        """Enter the states at full blocks and, with fine hashes, at the end of the prompt.

        A partial entry needs the computed tokens to end exactly at the prompt's last hash
        boundary. The next step writes on in that block, so it first moves the entry to a copy.
        vLLM looks at the known tokens only, and so also publishes a state that the same step
        overwrites.
        """
        first = int(self.num_cached[slot])
        entered = super().cache(slot, num_tokens, end, num_prompt, hashes)
        last = int(self.num_cached[slot])
        boundary = num_prompt // self.hash_block_size * self.hash_block_size
        ends_there = num_tokens == boundary and (end == boundary or self.publishes_overwritten)
        if ends_there and boundary % self.block_size != 0:
            key = self._enter_partial(slot, boundary, hashes, entered)
            if key is not None:
                place = boundary // self.block_size
                self._partial_hits[slot] = (place, int(self.table[slot, place]))
                self.num_cached[slot] = place
                self._cached_this_step.add(key)
        for block in self.table[slot, first:last].tolist():
            key = self.pool.key(block)
            if key is not None:
                self._cached_this_step.add(key)
        return entered

    def free(self, slot: int) -> None:
        """Take all blocks from a request."""
        super().free(slot)
        self._last_state[slot] = _NONE
        self._allocated[slot] = False

    def _num_required(self, num_main: int) -> int:
        return -(-num_main // self.block_size) + self.num_spec_blocks
