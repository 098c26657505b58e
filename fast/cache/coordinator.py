"""The K/V cache as the scheduler sees it: all groups over one pool.

Sources: ``KVCacheManager`` of ``vllm/v1/core/kv_cache_manager.py``, the coordinators of
``kv_cache_coordinator.py`` and ``resolve_kv_cache_block_sizes`` of ``kv_cache_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servespec.fast.cache.aligned import AlignedGdnGroup
from servespec.fast.cache.block_pool import NULL_BLOCK, BlockPool, IntArray
from servespec.fast.cache.groups import (
    UNLIMITED,
    BlockGroup,
    FullAttentionGroup,
    GdnGroup,
)
from servespec.fast.cache.prefix import HashChain, group_key
from servespec.fast.scheduling.requests import RequestTable
from servespec.reference.contracts import (
    BlockCopy,
    BlockTable,
    CacheConfig,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = ["KVCache", "PrefixHit"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a request can start from.

    Attributes
    ----------
    num_tokens : int
        Length of the hit.
    blocks : tuple of tuple of int
        Blocks for each group; a GDN group has nulls before its one state.
    shared_prefix : int
        Position of a longer hit of one group alone, whose GDN state is worth keeping; 0 if none.
    """

    num_tokens: int
    blocks: BlockTable
    shared_prefix: int = 0


class KVCache:
    """Blocks of all groups, and which of them hold which prefix.

    Parameters
    ----------
    scheduler : SchedulerConfig
    cache : CacheConfig
    speculative : SpeculativeConfig or None
    requests : RequestTable
        Whose slots index the block tables.

    Attributes
    ----------
    pool : BlockPool
    groups : tuple of BlockGroup
    aligned_groups : tuple of AlignedGdnGroup
    room : array of int64, shape (capacity,)
        Tokens up to which a request needs no further block.
    cache_at : array of int64, shape (capacity,)
        Known tokens at which the next block becomes full and gets its hash.
    skip_mark : array of int64, shape (capacity,)
        Aligned GDN block in which the processed tokens ended when states were last given up.
        While it stays so there is nothing more to give up: what an allocation makes superfluous is
        read by its own step.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None,
        requests: RequestTable,
    ) -> None:
        self._requests = requests
        self._max_model_len = scheduler.max_model_len
        self._num_lookahead = speculative.num_lookahead_tokens if speculative else 0
        self._use_eagle = speculative is not None and speculative.use_eagle
        self._watermark = int(scheduler.watermark * cache.num_gpu_blocks)
        self.block_size = cache.block_size
        self.aligned = cache.has_gdn and cache.mamba_cache_mode == "align"
        gdn_block = cache.block_size if self.aligned else scheduler.max_model_len
        sizes = {
            gdn_block if group.layer_type == "linear_attention" else cache.block_size
            for group in cache.groups
        }
        self.hashing = cache.enable_prefix_caching
        self.scheduler_block_size = math.lcm(*sizes)
        self.hash_block_size = self.scheduler_block_size
        unit = cache.prefix_match_unit
        if self.hashing and self.aligned and len(cache.groups) > 1 and unit is not None:
            self.hash_block_size = unit
        self.fine = self.hash_block_size < self.scheduler_block_size
        """Whether hits may end inside a block."""
        self.pool = BlockPool(cache.num_gpu_blocks, cache.enable_prefix_caching)
        self.groups = self._make_groups(scheduler, cache, speculative, gdn_block)
        self._attention = tuple(g for g in self.groups if isinstance(g, FullAttentionGroup))
        self._gdn = tuple(g for g in self.groups if not isinstance(g, FullAttentionGroup))
        self.aligned_groups = tuple(g for g in self.groups if isinstance(g, AlignedGdnGroup))
        # Only a priority victim can have been scheduled before in the step that preempts it.
        self._retracts = (
            scheduler.policy == "priority" and not scheduler.quirks.preempted_step_stays_cached
        )
        self._entered: dict[int, list[int]] = {}
        self._no_blocks: BlockTable = ((),) * len(self.groups)
        self._chains: dict[int, HashChain] = {}
        self.room: IntArray = np.zeros(requests.capacity, dtype=np.int64)
        self.cache_at: IntArray = np.zeros(requests.capacity, dtype=np.int64)
        self.skip_mark: IntArray = np.zeros(requests.capacity, dtype=np.int64)

    def add(self, slot: int) -> None:
        """Take note of a request that just got a slot."""
        if len(self.room) < self._requests.capacity:
            self._grow(self._requests.capacity)
        self.room[slot] = 0
        self.skip_mark[slot] = -1
        self.cache_at[slot] = UNLIMITED
        if self.hashing:
            self.cache_at[slot] = 0
            self._chains[slot] = HashChain(self._requests.request(slot), self.hash_block_size)

    def remove(self, slot: int) -> None:
        """Forget a request that holds no block."""
        self._chains.pop(slot, None)

    def new_step(self) -> None:
        """Begin a scheduling step."""
        self._entered.clear()
        if self.hashing:
            for group in self._gdn:
                group.new_step()

    def find_hit(self, slot: int) -> PrefixHit | None:
        """Find the longest cached prefix, short of the last token, whose logits are needed.

        Full attention goes first: its hits are runs from the left, so any shorter length is a hit
        as well. The states of the GDN groups then have to exist at one length all together, which
        is the final one, for a run can always be cut to it.

        Returns
        -------
        PrefixHit or None
            None if nothing matches.
        """
        if not self.hashing:
            return None
        hashes = self._hashes(slot)
        num_tokens = int(self._requests.num_tokens[slot]) - 1
        longest = 0
        blocks: list[list[int]] = [[] for _ in self.groups]
        if self._attention:
            num_tokens, runs = self._find_runs(hashes, num_tokens)
            longest = num_tokens
            for group, run in zip(self._attention, runs, strict=True):
                blocks[group.index] = run
        if self._gdn:
            num_tokens, states = self._find_states(hashes, num_tokens)
            longest = max(longest, num_tokens)
            num_blocks = -(-num_tokens // self.block_size)
            for gdn, state in zip(self._gdn, states, strict=False):
                blocks[gdn.index] = [NULL_BLOCK] * (num_blocks - 1) + [state]
            for group in self._attention:
                del blocks[group.index][num_blocks:]
        shared = longest if longest > num_tokens else 0
        return PrefixHit(num_tokens, tuple(tuple(ids) for ids in blocks), shared)

    def allocate(
        self,
        slot: int,
        num_new: int,
        hit: PrefixHit | None = None,
        *,
        admission: bool = False,
        reserve_full: bool = False,
        others_run: bool = False,
    ) -> BlockTable | None:
        """Give a request room for `num_new` more tokens, if there is any.

        States that nothing reads any more are given up even if the allocation then fails.

        Parameters
        ----------
        slot : int
        num_new : int
            Tokens to be computed in this step, drafts included.
        hit : PrefixHit or None
            What to start from.
        admission : bool
            Whether the request is not running yet.
        reserve_full : bool
            Whether an admission needs room for all known tokens.
        others_run : bool
            For an admission, whether other requests run: only then the watermark is kept.

        Returns
        -------
        tuple of tuple of int, or None
            Blocks to be reported for each group; None if the pool has too few.
        """
        requests = self._requests
        limit = self._max_model_len
        num_tokens = int(requests.num_tokens[slot])
        num_hit = int(requests.num_computed[slot]) + (hit.num_tokens if hit else 0)
        start = min(num_hit, limit)
        headroom = self._watermark if others_run else 0
        hits: Sequence[Sequence[int]] = hit.blocks if hit else self._no_blocks
        if reserve_full:
            full = min(num_tokens, limit)
            if self._demand(slot, full, full, hits, num_hit) + headroom > self.pool.num_free:
                return None
        num_main = start + num_new
        num_slots = min(num_main + self._num_lookahead, limit)
        if self.aligned:
            self._skip(slot, max(0, start - int(requests.num_in_flight[slot])))
        if not admission and not self.fine and num_main <= self.room[slot]:
            # No group lacks anything, so no free block is needed either.
            self.cache(slot, min(num_main, num_tokens), num_main)
            return self._no_blocks
        if self._demand(slot, num_slots, num_main, hits, num_hit) + headroom > self.pool.num_free:
            return None
        if any(hits):
            for group, blocks in zip(self.groups, hits, strict=True):
                group.adopt(slot, blocks, num_hit)
        new = tuple(tuple(g.allocate(slot, num_slots, num_main)) for g in self.groups)
        if any(new):
            self.note_room(np.array([slot]))
        self.cache(slot, min(num_main, num_tokens), num_main)
        return new

    def missing(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """Count the blocks that running requests lack for `num_tokens` tokens each.

        Returns
        -------
        array of int64, shape (len(slots), number of groups)
        """
        places = np.minimum(num_tokens + self._num_lookahead, self._max_model_len)
        counts = [group.missing(slots, places, num_tokens) for group in self.groups]
        return np.stack(counts, axis=1)

    def note_room(self, slots: IntArray) -> None:
        """Work out anew up to which length requests need no further block."""
        rooms = [
            group.room(slots, self._num_lookahead, self._max_model_len) for group in self.groups
        ]
        self.room[slots] = rooms[0] if len(rooms) == 1 else np.min(rooms, axis=0)

    def cache(self, slot: int, num_tokens: int, end: int) -> None:
        """Enter the full blocks among the first `num_tokens` tokens in the index.

        Parameters
        ----------
        slot : int
        num_tokens : int
            Tokens that are known and computed, or will be when the step is over.
        end : int
            Tokens at the end of the chunk just scheduled, known or not; -1 if none was.
        """
        # With fine hashes an entry can be due (again) at any length.
        if not self.hashing or (num_tokens < self.cache_at[slot] and not self.fine):
            return
        hashes = self._hashes(slot)
        num_prompt = int(self._requests.num_prompt[slot])
        aligned = num_tokens
        if len(self.groups) > 1 and not self.fine:
            aligned -= num_tokens % self.scheduler_block_size
        for group in self.groups:
            entered = group.cache(slot, aligned, end, num_prompt, hashes)
            if self._retracts:
                self._entered.setdefault(slot, []).extend(entered)
        self.cache_at[slot] = (num_tokens // self.block_size + 1) * self.block_size

    def retract(self, slot: int) -> None:
        """Take back the hashes of blocks that this step was to fill and now will not.

        vLLM does not, and lets later requests hit blocks that nobody computed. What a step in
        flight fills stays, though its hash was only known in this step.
        """
        computed = int(self._requests.num_computed[slot])
        for block in self._entered.pop(slot, ()):
            if self.pool.key_tokens(block) > computed:
                self.pool.drop_keys(block)

    def free(self, slot: int) -> None:
        """Take all blocks from a request, group by group."""
        for group in self.groups:
            group.free(slot)
        self.room[slot] = 0
        self.skip_mark[slot] = -1
        if self.hashing:
            self.cache_at[slot] = 0

    def block_table(self, slot: int) -> BlockTable:
        """Return the blocks of a request for each group."""
        return tuple(tuple(group.block_ids(slot)) for group in self.groups)

    def num_common_prefix(self, slot: int, num_holders: int) -> tuple[int, ...]:
        """Count, for each group, the leading blocks that all requests with blocks share."""
        if not self.hashing:
            return (0,) * len(self.groups)
        return tuple(group.num_common_prefix(slot, num_holders) for group in self.groups)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Hand over the copies of this step and let go of their blocks."""
        pairs = [pair for group in self.groups for pair in group.copies]
        if not pairs:
            return ()
        for group in self.groups:
            group.copies = []
        self.pool.release_repeated([block for pair in pairs for block in pair])
        return tuple(BlockCopy(src_block_id=src, dst_block_id=dst) for src, dst in pairs)

    def take_new_ids(self) -> tuple[int, ...]:
        """Hand over the blocks that the worker has to clear."""
        ids = tuple(block for group in self.groups for block in group.new_ids)
        for group in self.groups:
            if group.new_ids:
                group.new_ids = []
        return ids if self._gdn else ()

    def _make_groups(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None,
        gdn_block: int,
    ) -> tuple[BlockGroup, ...]:
        drafts = speculative.num_speculative_tokens if speculative else 0
        capacity = self._requests.capacity
        width = -(-self._max_model_len // cache.block_size)
        groups: list[BlockGroup] = []
        for index, group in enumerate(cache.groups):
            if group.layer_type == "full_attention":
                groups.append(
                    FullAttentionGroup(
                        index,
                        cache.block_size,
                        self.hash_block_size,
                        self.pool,
                        capacity,
                        width,
                        clears_blocks=cache.has_gdn,
                    )
                )
            elif self.aligned:
                groups.append(
                    AlignedGdnGroup(
                        index,
                        gdn_block,
                        self.hash_block_size,
                        self.pool,
                        capacity,
                        width + drafts,
                        drafts,
                        quirks=scheduler.quirks,
                    )
                )
            else:
                groups.append(
                    GdnGroup(index, gdn_block, self.hash_block_size, self.pool, capacity, drafts)
                )
        return tuple(groups)

    def _grow(self, capacity: int) -> None:
        for group in self.groups:
            group.grow(capacity)
        more = capacity - len(self.room)
        self.room = np.concatenate([self.room, np.zeros(more, dtype=np.int64)])
        self.cache_at = np.concatenate([self.cache_at, np.zeros(more, dtype=np.int64)])
        self.skip_mark = np.concatenate([self.skip_mark, np.zeros(more, dtype=np.int64)])

    def _hashes(self, slot: int) -> list[bytes]:
        chain = self._chains[slot]
        chain.extend(self._requests.known_tokens(slot))
        return chain.hashes

    def _demand(
        self, slot: int, num_slots: int, num_main: int, hits: Sequence[Sequence[int]], num_hit: int
    ) -> int:
        return sum(
            group.demand(slot, num_slots, num_main, hits[group.index], num_hit)
            for group in self.groups
        )

    def _skip(self, slot: int, num_processed: int) -> None:
        mark = (num_processed - 1) // self.block_size
        if self.skip_mark[slot] == mark and not self.fine:
            return
        for group in self._gdn:
            group.skip(slot, num_processed)
        self.skip_mark[slot] = mark

    def _find_all(self, digest: bytes, groups: Sequence[BlockGroup]) -> list[int] | None:
        """Look a hash up in several groups; None unless all of them know it."""
        found = []
        for group in groups:
            block = self.pool.find(group_key(digest, group.index))
            if block is None:
                return None
            found.append(block)
        return found

    def _find_runs(self, hashes: list[bytes], limit: int) -> tuple[int, list[list[int]]]:
        """Find the longest run of cached full-attention blocks from the left."""
        size, unit = self.block_size, self.hash_block_size
        scale = size // unit
        runs: list[list[int]] = [[] for _ in self._attention]
        for place in range(limit // size):
            found = self._find_all(hashes[(place + 1) * scale - 1], self._attention)
            if found is None:
                break
            for run, block in zip(runs, found, strict=True):
                run.append(block)
        full = len(runs[0])
        num_tokens = full * size
        if self.fine:
            # Then the longest known part of the block behind the run.
            last = min((full + 1) * scale - 1, limit // unit)
            for index in range(last - 1, full * scale - 1, -1):
                found = self._find_all(hashes[index], self._attention)
                if found is not None:
                    for run, block in zip(runs, found, strict=True):
                        run.append(block)
                    num_tokens = (index + 1) * unit
                    break
        if self._use_eagle and num_tokens > 0:
            # The drafter needs the hidden states of the last unit, so that is computed again.
            num_tokens -= unit
            for run in runs:
                del run[-(-num_tokens // size) :]
        return num_tokens, runs

    def _find_states(self, hashes: list[bytes], limit: int) -> tuple[int, list[int]]:
        """Find the longest prefix at which every GDN group has its state.

        Returns
        -------
        int
            Its length, 0 if there is none.
        list of int
            The state block of each group, empty if there is none.
        """
        unit = self.hash_block_size
        for index in range(limit // unit - 1, -1, -1):
            found = self._find_all(hashes[index], self._gdn)
            if found is not None:
                return (index + 1) * unit, found
        return 0, []
