"""The newer V0 block manager: lookahead slots, and a table that knows how many slots are taken.

It shares pools and tables (`servespec.reference.cache.v0_space`) with the older manager,
`servespec.reference.cache.v0_blocks`, and differs in these rules: the lowest id is given out first
at the start; a group needs a free block for each block its new tokens and lookahead slots touch;
sequences are swapped one by one, so shared blocks come apart.

Source: ``BlockSpaceManagerV2``, ``BlockTable`` and ``NaiveBlockAllocator`` of ``vllm/core`` of
vLLM 0.5.1 (``use_v2_block_manager``), without prefix caching, sliding windows and cross attention.
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
    fork,
    free,
    free_space,
    swap,
    swap_in_status,
    take,
    take_or_fail,
    with_table,
    withdraw,
)
from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig, V0SchedulingError

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
    """Return a space in which every block is free; the lowest id of a pool is given out first."""
    return free_space(config, highest_first=False)


def allocate(space: BlockSpace, seq_id: int, num_tokens: int, num_seqs: int) -> BlockSpace:
    """Give the one waiting sequence of a group blocks for all of its tokens.

    Parameters
    ----------
    space : BlockSpace
    seq_id, num_tokens : int
        The sequence and its known tokens.
    num_seqs : int
        Sequences of the group; of no effect here.
    """
    gpu, blocks = take(space.gpu, blocks_for(space, num_tokens))
    table = BlockTable(blocks=blocks, num_full_slots=num_tokens)
    return with_table(replace(space, gpu=gpu), seq_id, table)


def can_append_slots(
    space: BlockSpace, num_tokens: Mapping[int, int], num_lookahead_slots: int
) -> bool:
    """Tell whether there is a free block for every block that new slots of a group touch.

    The slots of a sequence are cut at block boundaries; the first piece counts even if it is
    empty, and each counts although the block may be there already and unshared.

    Parameters
    ----------
    space : BlockSpace
    num_tokens : mapping of int to int
        Known tokens of the running sequences, by sequence id.
    num_lookahead_slots : int
    """
    size = space.config.block_size
    touched = 0
    for seq_id, tokens in num_tokens.items():
        full = space.tables[seq_id].num_full_slots
        beyond = tokens - full + num_lookahead_slots - (size - full % size)
        touched += 1 + max(0, -(-beyond // size))
    return touched <= len(space.gpu.free)


def append_slots(
    space: BlockSpace, seq_id: int, num_tokens: int, num_lookahead_slots: int
) -> tuple[BlockSpace, BlockMoves]:
    """Give a sequence's new tokens slots, and blocks ahead for its lookahead slots.

    Blocks are added first; then every block that takes tokens is copied if others hold it too.
    The block of the first new slot is looked at even if there is no new token.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        The copies.

    Raises
    ------
    V0SchedulingError
        ``pool_exhausted`` if the free blocks do not suffice, which `can_append_slots` excludes
        except right after a swap-in; ``append_past_table`` if there is neither a new token nor a
        lookahead slot and the last block is full: an unfinished prefill whose length is a
        multiple of the block size.
    """
    size = space.config.block_size
    table = space.tables[seq_id]
    missing = num_tokens + num_lookahead_slots - len(table.blocks) * size
    gpu, new = take_or_fail(space.gpu, max(0, -(-missing // size)), seq_id)
    blocks = [*table.blocks, *new]
    first = table.num_full_slots // size
    if first == len(blocks):
        raise V0SchedulingError(
            "append_past_table", f"sequence {seq_id} has {len(blocks)} full blocks and no new token"
        )
    copies: list[tuple[int, int]] = []
    for index in range(first, max(first + 1, -(-num_tokens // size))):
        source = blocks[index]
        if gpu.ref_counts[source] > 1:
            gpu, target = take_or_fail(withdraw(gpu, (source,)), 1, seq_id)
            blocks[index] = target[0]
            copies.append((source, target[0]))
    table = BlockTable(blocks=tuple(blocks), num_full_slots=num_tokens)
    return with_table(replace(space, gpu=gpu), seq_id, table), tuple(copies)


def can_swap_in(space: BlockSpace, seq_ids: Sequence[int], num_lookahead_slots: int) -> AllocStatus:
    """Tell whether a swapped group can come back, as far as this manager counts.

    With lookahead slots, a block with free slots counts once if the lookahead slots fit it, and
    otherwise as the blocks that the rest of them fills; all other blocks count once however many
    share them. Nothing is set aside for the slots that the step appends.

    Parameters
    ----------
    space : BlockSpace
    seq_ids : sequence of int
        The swapped sequences of the group.
    num_lookahead_slots : int
    """
    size = space.config.block_size
    whole: set[int] = set()
    touched = 0
    for seq_id in seq_ids:
        table = space.tables[seq_id]
        for index, block in enumerate(table.blocks):
            empty = min(size, (index + 1) * size - table.num_full_slots)
            if empty <= 0 or num_lookahead_slots == 0:
                whole.add(block)
            else:
                touched += max(1, -(-(num_lookahead_slots - empty) // size))
    return swap_in_status(space, touched + len(whole))


def swap_in(space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences from the CPU to the GPU, each sequence by itself.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        CPU block and GPU block of each move; a block that sequences shared moves once for each.

    Raises
    ------
    V0SchedulingError
        ``pool_exhausted``.
    """
    return swap(space, seq_ids, "gpu", keep_shared=False)


def swap_out(space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences from the GPU to the CPU, each sequence by itself.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        GPU block and CPU block of each move; a block that sequences shared moves once for each.

    Raises
    ------
    V0SchedulingError
        ``pool_exhausted``.
    """
    return swap(space, seq_ids, "cpu", keep_shared=False)
