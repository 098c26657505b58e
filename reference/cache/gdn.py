"""State blocks of a GDN group in mode ``align``.

The table is indexed by position, as that of attention, but only a few entries hold a block: the
running state with one block for each draft at the end, the state before it until it has been
copied, and whatever the prefix cache found. The rest are nulls. The entry at index p holds the
state after ``(p + 1) * block_size`` tokens once a chunk has ended there, and only then can it be
hit, so chunks of a prefill end at block boundaries (`servespec.reference.scheduling.chunks`).

Source: ``MambaManager`` of ``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from servespec.reference.cache.blocks import (
    NULL_BLOCK,
    BlockPool,
    HashKey,
    count_free_hits,
    free_blocks,
    get_cached_blocks,
    get_new_blocks,
    move_hashes,
    register_hashes,
)
from servespec.reference.cache.full_attention import redirect
from servespec.reference.cache.layout import GroupLayout, blocks_for
from servespec.reference.cache.prefix import hash_at
from servespec.reference.cache.table import (
    Allocation,
    CacheableRequest,
    Copy,
    GroupBlocks,
    PartialHit,
    cache_full_blocks,
    ends_inside_block,
)
from servespec.reference.contracts import SchedulerDiedError

__all__ = [
    "allocate",
    "blocks_needed",
    "cache_blocks",
    "find_longest_hit",
    "remove_skipped",
    "waits_for_state",
]


def waits_for_state(pool: BlockPool, hits: Sequence[int], published: Set[HashKey]) -> bool:
    """Whether a hit relies on a state that only the current step computes.

    Attention may read K/V that the same step writes before; a recurrent state is read when the
    step begins, so the request has to wait for the next step.

    Parameters
    ----------
    pool : BlockPool
    hits : sequence of int
    published : set of HashKey
        Keys of states that became findable in this step.
    """
    return len(hits) > 0 and pool.hashes[hits[-1]].keys[0] in published


def blocks_needed(
    pool: BlockPool,
    group: GroupLayout,
    held: GroupBlocks,
    hits: Sequence[int],
    num_computed: int,
    num_main_tokens: int,
) -> int:
    """Count the free blocks for a state after `num_main_tokens` tokens.

    However far a chunk goes, it needs one block for its running state; the drafts' blocks are
    moved on from the step before. The first chunk needs those of the drafts too. Lookahead slots
    need none, since drafters have no GDN layers.

    The result is negative if the request holds more blocks than it needs (drafts were rejected),
    and lowers the sum over all groups then.
    """
    missing = blocks_for(num_main_tokens, group.block_size) + group.num_speculative_blocks
    missing -= len(hits) + len(held.blocks)
    copies = int(ends_inside_block(group, hits, num_computed) or held.partial_hit is not None)
    if copies:
        missing = max(missing, 0) + 1
    if missing > 0:
        first = 0 if held.has_running_state else group.num_speculative_blocks
        missing = 1 + first + copies
    return missing + count_free_hits(pool, hits)


def allocate(
    pool: BlockPool, group: GroupLayout, held: GroupBlocks, num_main_tokens: int
) -> Allocation:
    """Extend a table so that its last entries can take the state after `num_main_tokens` tokens.

    The gap up to the new state's entry is filled with nulls, then the drafts' blocks of the step
    before are moved behind it (their old entries become null), then the rest is allocated.

    A running request whose block was published for a prefix that ends inside it keeps that block,
    because the worker's table row can only grow: the cache's keys move to a new block instead,
    which gets a copy before the step overwrites the old one. A request that was just admitted on
    such a prefix is redirected to the copy itself.

    Raises
    ------
    SchedulerDiedError
        If the published block is in the table no more (quirk ``overwritten_tail_published``).
    """
    spec = group.num_speculative_blocks
    running, partial, length = held.has_running_state, held.partial_hit, len(held.blocks)
    required = blocks_for(num_main_tokens, group.block_size) + spec
    if required <= length and partial is None:
        return Allocation(pool, held)

    state_index = required - 1 - spec
    blocks = list(held.blocks)
    blocks += [NULL_BLOCK] * (state_index - length)
    last_state = held.last_state_index
    if running:
        last_state = length - 1 - spec
        for index in range(length - spec, min(state_index, length)):
            blocks.append(blocks[index])
            blocks[index] = NULL_BLOCK
    elif length > 0:
        last_state = length - 1

    count = required - len(blocks)
    if partial is not None:
        count = max(count, 0) + 1
    pool, new = get_new_blocks(pool, count)
    held = GroupBlocks(tuple(blocks), held.num_cached_blocks, partial, True, last_state)
    redirected: tuple[int, ...] = ()
    copy = republished = None
    if partial is not None:
        target, new = new[0], new[1:]
        if running:
            if held.blocks[partial.entry] != partial.block:
                raise SchedulerDiedError(
                    f"block {partial.block} was published and then freed before it was copied"
                )
            pool, copy, republished = _preserve(pool, partial.block, target)
            held = replace(held, partial_hit=None)
        else:
            pool, held, copy = redirect(pool, held, target)
            redirected = (target,)
    held = replace(held, blocks=held.blocks + new)
    reported = (*redirected, *blocks[length:], *new)
    return Allocation(pool, held, reported, (), copy, republished)


def _preserve(pool: BlockPool, source: int, target: int) -> tuple[BlockPool, Copy, HashKey]:
    """Move a block's keys to `target`, which gets its content; both stay held for the step."""
    pool = move_hashes(pool, source, target)
    ref_counts = list(pool.ref_counts)
    ref_counts[source] += 1
    pool = replace(pool, ref_counts=tuple(ref_counts))
    return pool, Copy(source, target), pool.hashes[target].keys[0]


def remove_skipped(
    pool: BlockPool, group: GroupLayout, held: GroupBlocks, num_processed: int, leaks: bool
) -> tuple[BlockPool, GroupBlocks]:
    """Free the states that no step needs any more, and put nulls in their places.

    These are all before the state of the token last processed. Only steps that have returned
    count: one in flight may still read the state it started from, and rejected drafts may set the
    request back.

    Parameters
    ----------
    pool : BlockPool
    group : GroupLayout
    held : GroupBlocks
    num_processed : int
        Computed tokens whose steps have returned.
    leaks : bool
        Whether the search ends at the first null, as in vLLM 0.27.1, which then looks only for the
        one state that the latest allocation started from. Chunks of several blocks leave nulls
        between states, so with steps in flight the states before those are forgotten.
    """
    skipped = max(num_processed - 1, 0) // group.block_size
    stale = []
    for index in range(min(skipped, len(held.blocks)) - 1, -1, -1):
        if held.blocks[index] != NULL_BLOCK:
            stale.append(index)
        elif leaks:
            break
    parts = [stale]
    last = held.last_state_index
    if leaks and last is not None and last < skipped:
        # Freed by itself, and so given out before the others.
        parts.append([last])
    blocks = list(held.blocks)
    for part in parts:
        freed = [blocks[index] for index in part if blocks[index] != NULL_BLOCK]
        if freed:
            pool = free_blocks(pool, freed)
        for index in part:
            blocks[index] = NULL_BLOCK
    return pool, replace(held, blocks=tuple(blocks))


def cache_blocks(
    pool: BlockPool,
    group: GroupLayout,
    held: GroupBlocks,
    request: CacheableRequest,
    num_tokens: int,
    unit: int,
    publish_tail: bool,
) -> tuple[BlockPool, GroupBlocks, frozenset[HashKey]]:
    """Cache the states among the first `num_tokens` tokens.

    With hashes finer than blocks, a chunk that ends exactly at the last unit of the prompt inside
    a block publishes its state too; the request then has to leave that block to the cache.

    Parameters
    ----------
    pool : BlockPool
    group : GroupLayout
    held : GroupBlocks
    request : CacheableRequest
    num_tokens : int
    unit : int
        Tokens per prefix hash.
    publish_tail : bool
        Whether to publish a state inside a block: it is there only until the next chunk is
        scheduled, which overwrites it.

    Returns
    -------
    pool : BlockPool
    held : GroupBlocks
    published : frozenset of HashKey
        Keys whose states only the current step computes.
    """
    pool, held, full = cache_full_blocks(pool, group, held, request, num_tokens, unit)
    published = {pool.hashes[block].keys[0] for block in full}
    boundary = request.num_prompt_tokens // unit * unit
    if publish_tail and num_tokens == boundary and boundary % group.block_size != 0:
        index = boundary // group.block_size
        block = held.blocks[index]
        if block != NULL_BLOCK:
            key = HashKey(group.index, hash_at(request.block_hashes, boundary, unit))
            pool = register_hashes(pool, ((block, key, boundary),))
            held = replace(held, num_cached_blocks=index, partial_hit=PartialHit(index, block))
            published.add(key)
    return pool, held, frozenset(published)


def find_longest_hit(
    pool: BlockPool,
    groups: Sequence[GroupLayout],
    block_hashes: Sequence[bytes],
    max_length: int,
    unit: int,
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Find the last state within `max_length` tokens that all GDN groups have cached.

    One state is all it takes, so the search goes from the right and the entries before are nulls.

    Returns
    -------
    blocks : tuple of tuple of int
        For each group.
    num_tokens : int
    """
    indices = [group.index for group in groups]
    for end in range(max_length // unit * unit, 0, -unit):
        found = get_cached_blocks(pool, hash_at(block_hashes, end, unit), indices)
        if found is not None:
            gap = (NULL_BLOCK,) * (blocks_for(end, groups[0].block_size) - 1)
            return tuple((*gap, block) for block in found), end
    return ((),) * len(groups), 0
