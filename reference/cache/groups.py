"""The cache of all groups together: prefix hits, slots for a step, caching, freeing.

Every group follows the rule of its kind (`full_attention`, `gdn`); this module keeps them in step.
The order of groups matters wherever blocks are taken or freed, since it decides who gets which
block, and is always that of the block table: GDN groups first, attention last.

Sources: ``vllm/v1/core/kv_cache_manager.py``, ``vllm/v1/core/kv_cache_coordinator.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from servespec.reference.cache import blocks as pools
from servespec.reference.cache import full_attention, gdn
from servespec.reference.cache.blocks import BlockPool, HashKey, initial_pool
from servespec.reference.cache.layout import CacheLayout, GroupKind, blocks_for
from servespec.reference.cache.table import (
    EMPTY,
    CacheableRequest,
    Copy,
    GroupBlocks,
    take_hits,
)
from servespec.reference.contracts import BlockCopy, BlockTable

__all__ = [
    "CacheState",
    "PrefixHit",
    "allocate_slots",
    "cache_blocks",
    "find_longest_cache_hit",
    "free",
    "initial_cache",
    "new_step",
    "num_common_prefix_blocks",
    "reset_prefix_cache",
    "take_copies",
    "take_fresh_blocks",
    "withdraw_uncomputed",
]


@dataclass(frozen=True, slots=True)
class CacheState:
    """The pool, the tables, and what the step being planned has yet to tell the worker.

    Attributes
    ----------
    layout : CacheLayout
    pool : BlockPool
    tables : mapping of str to tuple of GroupBlocks
        For each request that holds blocks.
    published : frozenset of HashKey
        Keys of states that only the current step computes.
    fresh : tuple of (int, int)
        Group and block: attention blocks that were given out, to be cleared.
    copies : tuple of (int, Copy)
        Group and copy: pending copies, both ends of which are held.
    """

    layout: CacheLayout
    pool: BlockPool
    tables: Mapping[str, tuple[GroupBlocks, ...]]
    published: frozenset[HashKey]
    fresh: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, Copy], ...]

    def block_table(self, request_id: str) -> BlockTable:
        """Return the block ids of a request that holds blocks, for each group."""
        return tuple(held.blocks for held in self.tables[request_id])


class PrefixHit(NamedTuple):
    """What the prefix cache has for a request.

    Attributes
    ----------
    blocks : tuple of tuple of int
        For each group, nulls included.
    num_tokens : int
        Tokens that need no computing.
    shared_prefix_boundary : int
        Tokens of a longer prefix that attention has but GDN lacks the state of; 0 if there is
        none. A chunk that ends there lets the next request share it.
    """

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int
    shared_prefix_boundary: int


def initial_cache(layout: CacheLayout) -> CacheState:
    """Return a cache in which all blocks are free."""
    pool = initial_pool(layout.num_blocks, layout.enable_caching)
    return CacheState(layout, pool, {}, frozenset(), (), ())


def new_step(cache: CacheState) -> CacheState:
    """Begin a step: states published by the steps before count as written."""
    return replace(cache, published=frozenset()) if cache.published else cache


def find_longest_cache_hit(cache: CacheState, request: CacheableRequest) -> PrefixHit:
    """Find the longest prefix that all groups have.

    The last known token is always computed again, for its logits are needed, so a hit ends before
    it. The length on which all groups agree is a fixed point: each group shortens the candidate to
    what it has until none shortens it further. With attention first and one further kind of group
    one round is enough, because attention has every shorter prefix of one that it has.

    Parameters
    ----------
    cache : CacheState
    request : CacheableRequest
        Whose `num_tokens` known tokens are looked for.
    """
    layout = cache.layout
    blocks: list[tuple[int, ...]] = [()] * len(layout.groups)
    if not layout.enable_caching:
        return PrefixHit(tuple(blocks), 0, 0)
    length = longest = request.num_tokens - 1
    attention = layout.of_kind(GroupKind.FULL_ATTENTION)
    states = layout.of_kind(GroupKind.GDN_ALIGN)
    hashes, unit = request.block_hashes, layout.hash_block_size
    if attention:
        found, length = full_attention.find_longest_hit(
            cache.pool, attention, hashes, length, unit, layout.use_eagle
        )
        longest = length
        for group, hits in zip(attention, found, strict=True):
            blocks[group.index] = hits
    if states:
        found, length = gdn.find_longest_hit(cache.pool, states, hashes, length, unit)
        for group, hits in zip(states, found, strict=True):
            blocks[group.index] = hits
        for group in attention:
            keep = blocks_for(length, group.block_size)
            blocks[group.index] = blocks[group.index][:keep]
    boundary = longest if attention and longest > length else 0
    return PrefixHit(tuple(blocks), length, boundary)


def allocate_slots(
    cache: CacheState,
    request: CacheableRequest,
    num_new_tokens: int,
    hit: PrefixHit | None = None,
    num_reserved: int = 0,
    full_sequence_must_fit: bool = False,
) -> tuple[CacheState, BlockTable | None]:
    """Give a request slots for its next tokens, or nothing if there are too few free blocks.

    Parameters
    ----------
    cache : CacheState
    request : CacheableRequest
        Its `num_computed_tokens` do not include the hit.
    num_new_tokens : int
        Tokens of this step, drafts included.
    hit : PrefixHit or None
        What an admitted request takes from the prefix cache.
    num_reserved : int
        Free blocks that have to be left over (the watermark).
    full_sequence_must_fit : bool
        Whether all known tokens need room, and not those of this step only: an admission that
        looks at the first chunk alone lets in more than can finish.

    Returns
    -------
    cache : CacheState
        GDN states that are no longer needed are freed even if there is no room.
    new_blocks : BlockTable or None
        What the worker appends to the request's table, hits excepted; None if there is no room.
    """
    layout = cache.layout
    hits = hit.blocks if hit is not None else ((),) * len(layout.groups)
    num_hit = hit.num_tokens if hit is not None else 0
    held = cache.tables.get(request.request_id, (EMPTY,) * len(layout.groups))
    num_computed = min(request.num_computed_tokens + num_hit, layout.max_model_len)
    num_main = num_computed + num_new_tokens
    num_slots = min(num_main + layout.num_lookahead_tokens, layout.max_model_len)

    if full_sequence_must_fit:
        known = min(request.num_tokens, layout.max_model_len)
        needed = _blocks_needed(cache, held, hits, num_hit, known, known)
        if needed + num_reserved > len(cache.pool.free):
            return cache, None
    processed = max(0, num_computed - request.num_in_flight_tokens)
    cache, held = _remove_skipped(cache, request.request_id, held, processed)
    needed = _blocks_needed(cache, held, hits, num_hit, num_slots, num_main)
    if needed + num_reserved > len(cache.pool.free):
        return cache, None

    pool, published = cache.pool, cache.published
    fresh, copies = list(cache.fresh), list(cache.copies)
    if any(hits):
        # All groups hold their hits before any takes a block that another's hit stands in.
        for blocks in hits:
            pool = pools.touch(pool, blocks)
        held = tuple(map(take_hits, layout.groups, hits, (num_hit,) * len(hits)))
    after, new_blocks = [], []
    for group, own in zip(layout.groups, held, strict=True):
        if group.kind is GroupKind.GDN_ALIGN:
            allocation = gdn.allocate(pool, group, own, num_main)
        else:
            allocation = full_attention.allocate(pool, group, own, num_slots)
        pool = allocation.pool
        after.append(allocation.held)
        new_blocks.append(allocation.new_blocks)
        fresh += [(group.index, block) for block in allocation.fresh]
        if allocation.copy is not None:
            copies.append((group.index, allocation.copy))
        if allocation.republished is not None:
            published |= {allocation.republished}
    if pool is not cache.pool:
        tables = {**cache.tables, request.request_id: tuple(after)}
        cache = CacheState(layout, pool, tables, published, tuple(fresh), tuple(copies))
    # Drafts are never hashed: they may be rejected.
    certain = min(num_main, request.num_tokens)
    return cache_blocks(cache, request, certain, certain == num_main), tuple(new_blocks)


def cache_blocks(
    cache: CacheState, request: CacheableRequest, num_tokens: int, ends_chunk: bool
) -> CacheState:
    """Make the full blocks of a request's first `num_tokens` tokens findable.

    This happens when the tokens are scheduled, before they are computed: steps run in order, so
    whoever hits such a block reads it after it was written.

    Parameters
    ----------
    cache : CacheState
    request : CacheableRequest
    num_tokens : int
        Tokens known for certain.
    ends_chunk : bool
        Whether the chunk just scheduled ends with them, so that a GDN state inside a block is
        theirs.
    """
    layout = cache.layout
    if not layout.enable_caching:
        return cache
    pool, published, unit = cache.pool, cache.published, layout.hash_block_size
    publish_tail = ends_chunk or layout.quirks.overwritten_tail_published
    tables = cache.tables[request.request_id]
    after = []
    for group, held in zip(layout.groups, tables, strict=True):
        if group.kind is GroupKind.GDN_ALIGN:
            pool, own, keys = gdn.cache_blocks(
                pool, group, held, request, num_tokens, unit, publish_tail
            )
            published |= keys
        else:
            pool, own = full_attention.cache_blocks(pool, group, held, request, num_tokens, unit)
        after.append(own)
    if pool is cache.pool and tables == tuple(after):
        return cache
    after_all = {**cache.tables, request.request_id: tuple(after)}
    return replace(cache, pool=pool, tables=after_all, published=published)


def free(cache: CacheState, request_id: str) -> CacheState:
    """Free all blocks of a request, if it holds any.

    Group by group, each from the tail: the end of a prefix is worth less to others than its
    beginning, so it should be given out first.
    """
    tables = dict(cache.tables)
    pool = cache.pool
    for held in tables.pop(request_id, ()):
        pool = pools.free_blocks(pool, reversed(held.blocks))
    return replace(cache, pool=pool, tables=tables)


def withdraw_uncomputed(cache: CacheState, request: CacheableRequest) -> CacheState:
    """Make unfindable what a request would only have computed in the step being planned.

    Blocks get their hashes when they are scheduled. If the request is preempted before the plan is
    complete, nobody computes them, and a later hit would read whatever the block held before.

    Parameters
    ----------
    cache : CacheState
    request : CacheableRequest
        Its computed tokens do not include the step's.
    """
    computed = request.num_computed_tokens
    hashes = cache.pool.hashes
    uncomputed = [
        block
        for held in cache.tables[request.request_id]
        for block in held.blocks
        if block in hashes and hashes[block].num_tokens > computed
    ]
    return replace(cache, pool=pools.remove_hashes(cache.pool, uncomputed))


def reset_prefix_cache(cache: CacheState) -> tuple[CacheState, bool]:
    """Forget all hashes if no request holds a block; return whether that was so."""
    pool, done = pools.reset_hashes(cache.pool)
    return replace(cache, pool=pool), done


def num_common_prefix_blocks(cache: CacheState, request_id: str) -> tuple[int, ...]:
    """Count, for each group, the leading blocks of a request that all requests with blocks hold.

    0 for GDN groups and without caching. Requests that are not scheduled count too, so the number
    may be smaller than what the scheduled ones share.
    """
    layout = cache.layout
    if not layout.enable_caching:
        return (0,) * len(layout.groups)
    return tuple(
        full_attention.count_common_prefix(cache.pool, held, len(cache.tables))
        if group.kind is GroupKind.FULL_ATTENTION
        else 0
        for group, held in zip(layout.groups, cache.tables[request_id], strict=True)
    )


def take_fresh_blocks(cache: CacheState) -> tuple[CacheState, tuple[int, ...]]:
    """Drain the blocks to be cleared, in group order.

    Only models with GDN layers need this: a state is read before all of it was written, and its
    memory may have held K/V before, and the other way round.
    """
    if not cache.fresh:
        return cache, ()
    fresh = tuple(block for _, block in sorted(cache.fresh, key=lambda entry: entry[0]))
    return replace(cache, fresh=()), fresh if cache.layout.has_gdn else ()


def take_copies(cache: CacheState) -> tuple[CacheState, tuple[BlockCopy, ...]]:
    """Drain the pending copies, in group order, and let go of both ends of each.

    The worker copies before it runs the step, and steps run in order, so whoever gets such a block
    from now on writes to it after the copy.
    """
    if not cache.copies:
        return cache, ()
    copies = [copy for _, copy in sorted(cache.copies, key=lambda entry: entry[0])]
    pool = pools.free_blocks(cache.pool, (block for copy in copies for block in copy))
    return (
        replace(cache, pool=pool, copies=()),
        tuple(BlockCopy(src_block_id=copy.source, dst_block_id=copy.target) for copy in copies),
    )


def _blocks_needed(
    cache: CacheState,
    held: tuple[GroupBlocks, ...],
    hits: tuple[tuple[int, ...], ...],
    num_hit: int,
    num_slots: int,
    num_main: int,
) -> int:
    """Sum the blocks needed over all groups; more than there are if a hit has to wait."""
    needed = 0
    for group, own, found in zip(cache.layout.groups, held, hits, strict=True):
        if group.kind is not GroupKind.GDN_ALIGN:
            needed += full_attention.blocks_needed(
                cache.pool, group, own, found, num_hit, num_slots
            )
        elif gdn.waits_for_state(cache.pool, found, cache.published):
            needed += cache.layout.num_blocks + 1
        else:
            needed += gdn.blocks_needed(cache.pool, group, own, found, num_hit, num_main)
    return needed


def _remove_skipped(
    cache: CacheState, request_id: str, held: tuple[GroupBlocks, ...], num_processed: int
) -> tuple[CacheState, tuple[GroupBlocks, ...]]:
    """Free the states of all GDN groups in mode ``align`` that are no longer needed."""
    pool, leaks = cache.pool, cache.layout.quirks.skipped_states_leak
    after = []
    for group, own in zip(cache.layout.groups, held, strict=True):
        if group.kind is GroupKind.GDN_ALIGN:
            pool, own = gdn.remove_skipped(pool, group, own, num_processed, leaks)
        after.append(own)
    if pool is cache.pool:
        return cache, held
    tables = {**cache.tables, request_id: tuple(after)}
    return replace(cache, pool=pool, tables=tables), tuple(after)
