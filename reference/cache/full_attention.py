"""Blocks of a full-attention group, and of a GDN group in mode ``none``.

Both hold every block until the request ends. A GDN state in mode ``none`` is one block for the
life of the request plus one for each draft, and is never cached.

Sources: ``FullAttentionManager`` and the mode ``none`` of ``MambaManager`` in
``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from servespec.reference.cache.blocks import (
    BlockPool,
    HashKey,
    count_free_hits,
    get_cached_blocks,
    get_new_blocks,
    register_hashes,
)
from servespec.reference.cache.layout import GroupKind, GroupLayout, blocks_for
from servespec.reference.cache.prefix import hash_at
from servespec.reference.cache.table import (
    Allocation,
    CacheableRequest,
    Copy,
    GroupBlocks,
    cache_full_blocks,
    ends_inside_block,
)

__all__ = [
    "allocate",
    "blocks_needed",
    "cache_blocks",
    "count_common_prefix",
    "find_longest_hit",
]


def blocks_needed(
    pool: BlockPool,
    group: GroupLayout,
    held: GroupBlocks,
    hits: Sequence[int],
    num_computed: int,
    num_slots: int,
) -> int:
    """Count the free blocks it takes to give a request `num_slots` token slots.

    Hits that are free count, for they leave the queue when touched; a hit that ends inside a block
    costs the block it is copied to. A request that holds more than it needs (drafts were rejected)
    needs none.

    Parameters
    ----------
    pool : BlockPool
    group : GroupLayout
    held : GroupBlocks
    hits : sequence of int
        Blocks of a prefix hit not taken yet; empty for a running request.
    num_computed : int
        Tokens of the hit.
    num_slots : int
        Slots in all, those held included.
    """
    missing = max(_required(group, num_slots) - len(hits) - len(held.blocks), 0)
    copies = int(ends_inside_block(group, hits, num_computed))
    return missing + copies + count_free_hits(pool, hits)


def allocate(pool: BlockPool, group: GroupLayout, held: GroupBlocks, num_slots: int) -> Allocation:
    """Extend a table to `num_slots` slots.

    If the table starts with a hit that ends inside a block, the entry is redirected to a new block
    that gets a copy of the shared one. Both ends of the copy stay held (the copy's target by one
    holder more than the table) until the plan of the step is complete, so that nothing else of the
    same step can take them.
    """
    copied: tuple[int, ...] = ()
    copy = None
    if held.partial_hit is not None:
        pool, copied = get_new_blocks(pool, 1)
        pool, held, copy = redirect(pool, held, copied[0])
    missing = _required(group, num_slots) - len(held.blocks)
    new: tuple[int, ...] = ()
    if missing > 0:
        pool, new = get_new_blocks(pool, missing)
        held = replace(held, blocks=held.blocks + new)
    taken = copied + new
    fresh = taken if group.kind is GroupKind.FULL_ATTENTION else ()
    return Allocation(pool, held, taken, fresh, copy)


def redirect(
    pool: BlockPool, held: GroupBlocks, target: int
) -> tuple[BlockPool, GroupBlocks, Copy]:
    """Put `target` in the place of a shared block whose content it will be given."""
    assert held.partial_hit is not None
    index, source = held.partial_hit
    ref_counts = list(pool.ref_counts)
    ref_counts[target] += 1
    blocks = (*held.blocks[:index], target, *held.blocks[index + 1 :])
    return (
        replace(pool, ref_counts=tuple(ref_counts)),
        replace(held, blocks=blocks, partial_hit=None),
        Copy(source, target),
    )


def cache_blocks(
    pool: BlockPool,
    group: GroupLayout,
    held: GroupBlocks,
    request: CacheableRequest,
    num_tokens: int,
    unit: int,
) -> tuple[BlockPool, GroupBlocks]:
    """Cache the first `num_tokens` tokens.

    With hashes finer than blocks, the block in which the prompt ends can also be found by the last
    unit of the prompt, so that a longer prompt may share it; no other unit inside a block can.
    """
    pool, held, _ = cache_full_blocks(pool, group, held, request, num_tokens, unit)
    boundary = request.num_prompt_tokens // unit * unit
    if 0 < boundary <= num_tokens and boundary % group.block_size != 0:
        block = held.blocks[boundary // group.block_size]
        key = HashKey(group.index, hash_at(request.block_hashes, boundary, unit))
        pool = register_hashes(pool, ((block, key, boundary),))
    return pool, held


def find_longest_hit(
    pool: BlockPool,
    groups: Sequence[GroupLayout],
    block_hashes: Sequence[bytes],
    max_length: int,
    unit: int,
    use_eagle: bool,
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Find the longest cached prefix in all full-attention groups.

    Full blocks match from the left, since no block can match after one that does not; then the
    units inside the next block are tried, longest first. A drafter that reads hidden states needs
    the last ones computed again and costs the last unit.

    Parameters
    ----------
    pool : BlockPool
    groups : sequence of GroupLayout
        All of one block size.
    block_hashes : sequence of bytes
    max_length : int
        Most tokens the hit may have.
    unit : int
        Tokens per prefix hash.
    use_eagle : bool

    Returns
    -------
    blocks : tuple of tuple of int
        For each group.
    num_tokens : int
    """
    indices = [group.index for group in groups]
    block_size = groups[0].block_size
    columns: list[tuple[int, ...]] = []
    length = 0
    while length + block_size <= max_length:
        end = length + block_size
        found = get_cached_blocks(pool, hash_at(block_hashes, end, unit), indices)
        if found is None:
            break
        columns.append(found)
        length = end
    longest = min(length + block_size - unit, max_length // unit * unit)
    for end in range(longest, length, -unit):
        found = get_cached_blocks(pool, hash_at(block_hashes, end, unit), indices)
        if found is not None:
            columns.append(found)
            length = end
            break
    if use_eagle and length > 0:
        length -= unit
    del columns[blocks_for(length, block_size) :]
    return tuple(zip(*columns, strict=True)) if columns else ((),) * len(groups), length


def count_common_prefix(pool: BlockPool, held: GroupBlocks, num_holders: int) -> int:
    """Count the leading blocks that every request with blocks holds."""
    count = 0
    for block in held.blocks:
        if pool.ref_counts[block] != num_holders:
            break
        count += 1
    return count


def _required(group: GroupLayout, num_slots: int) -> int:
    """Blocks for `num_slots` slots, and one for each draft's state in a GDN group."""
    return blocks_for(num_slots, group.block_size) + group.num_speculative_blocks
