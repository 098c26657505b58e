"""GDN layers with a state at every block boundary (mode ``align``).

Source: ``MambaManager`` of ``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import NULL_BLOCK, BlockPool, IntArray
from servespec.fast.cache.groups import NO_PLACE, BlockGroup
from servespec.reference.contracts import Quirks, SchedulerDiedError

__all__ = ["AlignedGdnGroup"]


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
        quirks: Quirks,
    ) -> None:
        super().__init__(index, block_size, hash_block_size, pool, capacity, width)
        self.num_spec_blocks = num_spec_blocks
        self._publishes_overwritten = quirks.overwritten_tail_published
        self._leaks_skipped = quirks.skipped_states_leak
        # Keys whose states are only written in this step: no other request may start from them.
        self._cached_this_step: set[bytes] = set()
        self._last_state: IntArray = np.full(capacity, NO_PLACE, dtype=np.int64)
        self._allocated: npt.NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)

    def grow(self, capacity: int) -> None:
        """Make room for more slots."""
        super().grow(capacity)
        more = capacity - len(self._last_state)
        self._last_state = np.concatenate(
            [self._last_state, np.full(more, NO_PLACE, dtype=np.int64)]
        )
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
                if self.table[slot, place] != source:
                    raise SchedulerDiedError(
                        f"block {source} was published and then freed before it was copied"
                    )
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
        """Give up states before the one that `num_processed` tokens end in.

        vLLM stops at the first null on the way down and, besides, remembers one state: with two
        chunks of several blocks in flight it loses the state between them.
        """
        current = (num_processed - 1) // self.block_size
        row = self.table[slot]
        freed = []
        for place in range(min(current, int(self.counts[slot])) - 1, -1, -1):
            if row[place] != NULL_BLOCK:
                freed.append(int(row[place]))
                row[place] = NULL_BLOCK
            elif self._leaks_skipped:
                break
        if freed:
            self.pool.release(np.array(freed, dtype=np.int64))
        last = int(self._last_state[slot])
        if last != NO_PLACE and last < current and row[last] != NULL_BLOCK:
            self.pool.release(row[last : last + 1].astype(np.int64))
            row[last] = NULL_BLOCK

    def room(self, slots: IntArray, num_lookahead: int, max_model_len: int) -> IntArray:
        """Return the tokens up to which `allocate` does nothing; lookahead does not count."""
        places: IntArray = (self.counts[slots] - self.num_spec_blocks) * self.block_size
        return places

    def missing(self, slots: IntArray, num_slots: IntArray, num_main: IntArray) -> IntArray:
        """Count the blocks that running requests lack; 1 means that nothing has to be moved."""
        required: IntArray = -(-num_main // self.block_size) + self.num_spec_blocks
        required -= self.counts[slots]
        return np.maximum(required, 0, out=required)

    def append_each(self, slots: IntArray, blocks: IntArray) -> None:
        """Give each running request one block: its first draft block becomes the state."""
        self._last_state[slots] = self.counts[slots] - 1 - self.num_spec_blocks
        super().append_each(slots, blocks)

    def given_up(
        self, slots: IntArray, current: IntArray
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Look up what `skip` would give up.

        Parameters
        ----------
        slots : array of int64, shape (n,)
        current : array of int64, shape (n,)
            The block in which the processed tokens of each request end.

        Returns
        -------
        blocks : array of int64, shape (n, 2)
            In the order in which they would be given up; null if there is none.
        simple : array of bool, shape (n,)
            Whether that is all.
        """
        top = np.minimum(current, self.counts[slots]) - 1
        last = self._last_state[slots]
        blocks = np.zeros((len(slots), 2), dtype=np.int64)
        blocks[:, 0] = np.where(top >= 0, self.table[slots, np.maximum(top, 0)], NULL_BLOCK)
        second = (last >= 0) & (last < current) & (last != top)
        blocks[:, 1] = np.where(second, self.table[slots, np.maximum(last, 0)], NULL_BLOCK)
        if self._leaks_skipped:
            below = np.where(top >= 1, self.table[slots, np.maximum(top - 1, 0)], NULL_BLOCK)
            return blocks, (blocks[:, 0] == NULL_BLOCK) | (below == NULL_BLOCK)
        width = max(int(top.max(initial=0)) + 1, 1)
        held = self.table[slots, :width] != NULL_BLOCK
        held &= np.arange(width) <= top[:, None]
        simple: npt.NDArray[np.bool_] = held.sum(axis=1) == (blocks != NULL_BLOCK).sum(axis=1)
        return blocks, simple

    def give_up(self, slots: IntArray, current: IntArray) -> None:
        """Put nulls where `given_up` found blocks."""
        top = np.minimum(current, self.counts[slots]) - 1
        last = self._last_state[slots]
        for places, valid in ((top, top >= 0), (last, (last >= 0) & (last < current))):
            self.table[slots[valid], places[valid]] = NULL_BLOCK

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
        ends_there = num_tokens == boundary and (end == boundary or self._publishes_overwritten)
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
        self._last_state[slot] = NO_PLACE
        self._allocated[slot] = False

    def _num_required(self, num_main: int) -> int:
        return -(-num_main // self.block_size) + self.num_spec_blocks
