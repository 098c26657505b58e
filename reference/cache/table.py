"""What one request holds in one group, and the rules that all groups share.

Source: ``SingleTypeKVCacheManager`` of ``vllm/v1/core/single_type_kv_cache_manager.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from servespec.reference.cache.blocks import BlockPool, HashKey, register_hashes
from servespec.reference.cache.layout import GroupLayout
from servespec.reference.cache.prefix import hash_at

__all__ = [
    "EMPTY",
    "Allocation",
    "CacheableRequest",
    "Copy",
    "GroupBlocks",
    "PartialHit",
    "cache_full_blocks",
    "ends_inside_block",
    "take_hits",
]


class CacheableRequest(Protocol):
    """What the cache asks of a request."""

    @property
    def request_id(self) -> str:
        """Name of the request."""

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V and states are there, or will be after the steps in flight."""

    @property
    def num_in_flight_tokens(self) -> int:
        """Those of the computed tokens whose step has not returned."""

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """Prefix hashes of all full units of the known tokens."""


class PartialHit(NamedTuple):
    """A table entry whose block ends up shared with the prefix cache in the middle.

    The request must not write on in a block that the cache shows to others, so its next
    allocation copies the block first.
    """

    entry: int
    block: int


class Copy(NamedTuple):
    """A pending copy of one block's content."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one request in one group.

    Attributes
    ----------
    blocks : tuple of int
        The block table, nulls included.
    num_cached_blocks : int
        Leading entries that need no hash any more.
    partial_hit : PartialHit or None
        An entry to be copied before it is written.
    has_running_state : bool
        GDN in mode ``align``: whether the last ``1 + num_speculative_blocks`` entries hold the
        running state (and not merely a state that a prefix hit brought).
    last_state_index : int or None
        GDN in mode ``align``: the entry that held the state before the latest allocation.
    """

    blocks: tuple[int, ...] = ()
    num_cached_blocks: int = 0
    partial_hit: PartialHit | None = None
    has_running_state: bool = False
    last_state_index: int | None = None


EMPTY = GroupBlocks()


class Allocation(NamedTuple):
    """What allocating for one request in one group led to.

    Attributes
    ----------
    pool : BlockPool
    held : GroupBlocks
    new_blocks : tuple of int
        What the worker appends to its table row, nulls and moved blocks included.
    fresh : tuple of int
        Blocks whose old content must not be seen.
    copy : Copy or None
    republished : HashKey or None
        A key that leads to a block which only the pending copy fills.
    """

    pool: BlockPool
    held: GroupBlocks
    new_blocks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    copy: Copy | None = None
    republished: HashKey | None = None


def ends_inside_block(group: GroupLayout, hits: Sequence[int], num_computed: int) -> bool:
    """Whether a prefix hit of `num_computed` tokens ends inside a block of the group."""
    return len(hits) > 0 and num_computed % group.block_size != 0


def take_hits(group: GroupLayout, hits: tuple[int, ...], num_computed: int) -> GroupBlocks:
    """Start a table with the blocks of a prefix hit.

    Full blocks are cached already. A block in which the hit ends is shared as far as the hit goes,
    is to be copied before the request writes behind it, and can be cached again once full.
    """
    if ends_inside_block(group, hits, num_computed):
        index = num_computed // group.block_size
        return GroupBlocks(hits, index, PartialHit(index, hits[-1]))
    return GroupBlocks(hits, len(hits))


def cache_full_blocks(
    pool: BlockPool,
    group: GroupLayout,
    held: GroupBlocks,
    request: CacheableRequest,
    num_tokens: int,
    unit: int,
) -> tuple[BlockPool, GroupBlocks, tuple[int, ...]]:
    """Give hashes to the full blocks of the first `num_tokens` tokens that have none yet.

    Parameters
    ----------
    pool : BlockPool
    group : GroupLayout
    held : GroupBlocks
    request : CacheableRequest
    num_tokens : int
        Tokens known for certain; drafts are left out, for they may be rejected.
    unit : int
        Tokens per prefix hash.

    Returns
    -------
    pool : BlockPool
    held : GroupBlocks
    blocks : tuple of int
        Blocks that got their hash now; nulls get none.
    """
    first, last = held.num_cached_blocks, num_tokens // group.block_size
    if first >= last:
        return pool, held, ()
    entries = []
    for index in range(first, last):
        block = held.blocks[index]
        if block:
            end = (index + 1) * group.block_size
            key = HashKey(group.index, hash_at(request.block_hashes, end, unit))
            entries.append((block, key, end))
    pool = register_hashes(pool, entries)
    return pool, replace(held, num_cached_blocks=last), tuple(block for block, _, _ in entries)
