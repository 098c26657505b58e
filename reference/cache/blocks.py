"""The block pool: which blocks are free, who holds the others, and which can be found by hash.

A block is an integer id. Block 0 is the null block: it pads tables and is never given out, freed
or counted. All functions return a new pool and leave their argument alone.

Sources: ``vllm/v1/core/block_pool.py``, ``FreeKVCacheBlockQueue`` of
``vllm/v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = [
    "NULL_BLOCK",
    "BlockPool",
    "HashKey",
    "RegisteredHashes",
    "count_free_hits",
    "free_blocks",
    "get_cached_blocks",
    "get_new_blocks",
    "initial_pool",
    "move_hashes",
    "register_hashes",
    "remove_hashes",
    "reset_hashes",
    "touch",
]

NULL_BLOCK = 0


class HashKey(NamedTuple):
    """What a cached block is found by: its prefix hash and its group."""

    group: int
    prefix_hash: bytes


class RegisteredHashes(NamedTuple):
    """The keys that lead to one block.

    The first key is the block's own; further ones stand for shorter prefixes that end inside the
    same block. `num_tokens` is the length of the prefix that the first key stands for.
    """

    keys: tuple[HashKey, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockPool:
    """All blocks of all groups.

    Attributes
    ----------
    enable_caching : bool
        Whether blocks may carry hashes; it also decides where freed blocks go.
    free : tuple of int
        The free queue; the head is given out next.
    ref_counts : tuple of int
        Holders of each block, by block id. That of the null block stays 0.
    hashes : mapping of int to RegisteredHashes
        Keys of every cached block.
    blocks_by_hash : mapping of HashKey to tuple of int
        Blocks of every key, first registered first.
    """

    enable_caching: bool
    free: tuple[int, ...]
    ref_counts: tuple[int, ...]
    hashes: Mapping[int, RegisteredHashes]
    blocks_by_hash: Mapping[HashKey, tuple[int, ...]]


def initial_pool(num_blocks: int, enable_caching: bool) -> BlockPool:
    """Return a pool whose blocks are all free, in ascending order, but for the null block.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool, the null block included; at least 1.
    enable_caching : bool
    """
    return BlockPool(enable_caching, tuple(range(1, num_blocks)), (0,) * num_blocks, {}, {})


def get_new_blocks(pool: BlockPool, count: int) -> tuple[BlockPool, tuple[int, ...]]:
    """Take `count` blocks from the head of the free queue.

    A block that is given out loses its hashes: this is the eviction of the prefix cache. The
    caller has made sure that enough blocks are free.
    """
    taken = pool.free[:count]
    ref_counts = list(pool.ref_counts)
    for block in taken:
        ref_counts[block] = 1
    pool = remove_hashes(pool, taken)
    return replace(pool, free=pool.free[count:], ref_counts=tuple(ref_counts)), taken


def touch(pool: BlockPool, blocks: Iterable[int]) -> BlockPool:
    """Add a holder to each block; one that was free leaves the queue from where it stands.

    A block on which a prefix hit lands may be free and still hold its content, so it leaves the
    middle of the queue.
    """
    ref_counts = list(pool.ref_counts)
    revived = set()
    for block in blocks:
        if block == NULL_BLOCK:
            continue
        if ref_counts[block] == 0:
            revived.add(block)
        ref_counts[block] += 1
    free = pool.free
    if revived:
        free = tuple(block for block in free if block not in revived)
    return replace(pool, free=free, ref_counts=tuple(ref_counts))


def free_blocks(pool: BlockPool, blocks: Iterable[int]) -> BlockPool:
    """Take one holder from each block; blocks without any return to the free queue.

    A block without hash can never be found again, so it goes to the head, to be used before
    anything that might still be hit; among themselves such blocks keep the given order. A block
    with a hash goes to the tail (least recently used first). Without caching all go to the tail.

    Parameters
    ----------
    pool : BlockPool
    blocks : iterable of int
        In the order in which they should be given out again; nulls are passed over.
    """
    ref_counts = list(pool.ref_counts)
    head: list[int] = []
    tail: list[int] = []
    for block in blocks:
        if block == NULL_BLOCK:
            continue
        ref_counts[block] -= 1
        if ref_counts[block] == 0:
            (head if pool.enable_caching and block not in pool.hashes else tail).append(block)
    return replace(pool, free=(*head, *pool.free, *tail), ref_counts=tuple(ref_counts))


def count_free_hits(pool: BlockPool, blocks: Sequence[int]) -> int:
    """Count the blocks among hits that are in the free queue, and would leave it when touched."""
    return sum(block != NULL_BLOCK and pool.ref_counts[block] == 0 for block in blocks)


def get_cached_blocks(
    pool: BlockPool, prefix_hash: bytes, groups: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the block of each group for a prefix, or None if any group lacks it.

    Equal prefixes are not merged: one key may lead to several blocks, and the first registered is
    the one that is found.
    """
    found = []
    for group in groups:
        blocks = pool.blocks_by_hash.get(HashKey(group, prefix_hash))
        if blocks is None:
            return None
        found.append(blocks[0])
    return tuple(found)


def register_hashes(pool: BlockPool, entries: Iterable[tuple[int, HashKey, int]]) -> BlockPool:
    """Make blocks findable.

    Parameters
    ----------
    pool : BlockPool
    entries : iterable of (int, HashKey, int)
        Block, key, and tokens of the prefix that the key stands for. A block whose own key stands
        for a shorter prefix loses all its keys first (the block has been filled further); one
        whose own key stands for a longer prefix gets a further key.
    """
    hashes = dict(pool.hashes)
    blocks_by_hash = dict(pool.blocks_by_hash)
    for block, key, num_tokens in entries:
        known = hashes.get(block)
        if known is not None and key in known.keys:
            continue
        if known is not None and known.num_tokens < num_tokens:
            _forget(hashes, blocks_by_hash, block)
            known = None
        if known is None:
            hashes[block] = RegisteredHashes((key,), num_tokens)
        else:
            hashes[block] = RegisteredHashes((*known.keys, key), known.num_tokens)
        blocks_by_hash[key] = (*blocks_by_hash.get(key, ()), block)
    return replace(pool, hashes=hashes, blocks_by_hash=blocks_by_hash)


def remove_hashes(pool: BlockPool, blocks: Iterable[int]) -> BlockPool:
    """Make blocks unfindable; those without hash are passed over."""
    cached = [block for block in blocks if block in pool.hashes]
    if not cached:
        return pool
    hashes = dict(pool.hashes)
    blocks_by_hash = dict(pool.blocks_by_hash)
    for block in cached:
        _forget(hashes, blocks_by_hash, block)
    return replace(pool, hashes=hashes, blocks_by_hash=blocks_by_hash)


def move_hashes(pool: BlockPool, source: int, target: int) -> BlockPool:
    """Let the keys of `source`, a cached block, lead to `target`, one without hash, instead."""
    known = pool.hashes[source]
    pool = remove_hashes(pool, (source,))
    return register_hashes(pool, ((target, key, known.num_tokens) for key in known.keys))


def reset_hashes(pool: BlockPool) -> tuple[BlockPool, bool]:
    """Forget all hashes if no block is held; return whether that was so.

    The order of the free queue stays.
    """
    if len(pool.free) != len(pool.ref_counts) - 1:
        return pool, False
    return replace(pool, hashes={}, blocks_by_hash={}), True


def _forget(
    hashes: dict[int, RegisteredHashes],
    blocks_by_hash: dict[HashKey, tuple[int, ...]],
    block: int,
) -> None:
    """Drop one block's keys from both (fresh) mappings."""
    for key in hashes.pop(block).keys:
        others = tuple(other for other in blocks_by_hash[key] if other != block)
        if others:
            blocks_by_hash[key] = others
        else:
            del blocks_by_hash[key]
