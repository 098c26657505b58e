"""The V0 block manager: a slot at a time, copy on write, swapping that keeps sharing.

Pools, tables and what both managers do alike are in `servespec.reference.cache.v0_space`.

Source: ``UncachedBlockAllocator`` and ``BlockSpaceManagerV1`` of ``vllm/core/block_manager_v1.py``
of vLLM 0.5.1, without prefix caching, sliding windows and cross attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from servespec.reference.cache.v0_space import (
    BlockMoves,
    BlockSpace,
    BlockTable,
    blocks_for,
    can_allocate,
    can_swap_out,
    distinct_blocks,
    fork,
    free,
    free_space,
    swap,
    swap_in_status,
    take,
    with_table,
    withdraw,
)
from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig

__all__ = [
    "allocate",
    "append_slots",
    "can_allocate",
    "can_append_slots",
    "can_swap_in",
    "can_swap_out",
    "fork",
    "free",
    "initial_space",
    "swap_in",
    "swap_out",
]


def initial_space(config: V0CacheConfig) -> BlockSpace:
    """Return a space in which every block is free; the highest id of a pool is given out first."""
    return free_space(config, highest_first=True)


def allocate(space: BlockSpace, seq_id: int, num_tokens: int, num_seqs: int) -> BlockSpace:
    """Give the one waiting sequence of a group blocks for all of its tokens.

    Parameters
    ----------
    space : BlockSpace
    seq_id, num_tokens : int
        The sequence and its known tokens.
    num_seqs : int
        Sequences of the group, finished ones included. The blocks count that many holders, so
        those of a sequence that was recomputed after a sibling had finished are never freed.
    """
    gpu, blocks = take(space.gpu, blocks_for(space, num_tokens), holders=num_seqs)
    return with_table(replace(space, gpu=gpu), seq_id, BlockTable(blocks=blocks))


def can_append_slots(
    space: BlockSpace, num_tokens: Mapping[int, int], num_lookahead_slots: int
) -> bool:
    """Tell whether every running sequence of a group could take a fresh block.

    The rule is coarse on purpose: one free block a sequence covers both the next block and a
    copy on write, and asks nothing of the tables.

    Parameters
    ----------
    space : BlockSpace
    num_tokens : mapping of int to int
        Known tokens of the running sequences, by sequence id.
    num_lookahead_slots : int
        0: this manager does not know lookahead slots.
    """
    return len(num_tokens) <= len(space.gpu.free)


def append_slots(
    space: BlockSpace, seq_id: int, num_tokens: int, num_lookahead_slots: int
) -> tuple[BlockSpace, BlockMoves]:
    """Give a sequence's newest token a slot in a block of its own.

    A token that starts a block gets a fresh one. Otherwise it goes to the last block, which is
    copied first if others hold it too.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        The copy, if there is one.
    """
    table = space.tables[seq_id]
    if len(table.blocks) < blocks_for(space, num_tokens):
        gpu, new = take(space.gpu, 1)
        return _with_blocks(replace(space, gpu=gpu), seq_id, (*table.blocks, *new)), ()
    last = table.blocks[-1]
    if space.gpu.ref_counts[last] == 1:
        return space, ()
    gpu, new = take(space.gpu, 1)
    space = replace(space, gpu=withdraw(gpu, (last,)))
    return _with_blocks(space, seq_id, (*table.blocks[:-1], *new)), ((last, new[0]),)


def can_swap_in(space: BlockSpace, seq_ids: Sequence[int], num_lookahead_slots: int) -> AllocStatus:
    """Tell whether a swapped group can come back: its blocks and one more a sequence.

    Parameters
    ----------
    space : BlockSpace
    seq_ids : sequence of int
        The swapped sequences of the group.
    num_lookahead_slots : int
        0: this manager does not know lookahead slots.
    """
    return swap_in_status(space, len(distinct_blocks(space, seq_ids)) + len(seq_ids))


def swap_in(space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences from the CPU to the GPU; shared blocks stay shared.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        CPU block and GPU block of each move.
    """
    return swap(space, seq_ids, "gpu", keep_shared=True)


def swap_out(space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences from the GPU to the CPU; shared blocks stay shared.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        GPU block and CPU block of each move.
    """
    return swap(space, seq_ids, "cpu", keep_shared=True)


def _with_blocks(space: BlockSpace, seq_id: int, blocks: tuple[int, ...]) -> BlockSpace:
    return with_table(space, seq_id, replace(space.tables[seq_id], blocks=blocks))
