"""The V0 block manager: two pools, a block table a sequence, copy on write, swapping.

A free block is taken from the top of a stack and put back on top, so the block freed last is
given out first. Forked sequences share blocks; a block knows only how many hold it.

Source: ``UncachedBlockAllocator`` and ``BlockSpaceManagerV1`` of ``vllm/core/block_manager_v1.py``
of vLLM 0.5.1, without prefix caching, sliding windows and cross attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig

__all__ = [
    "BlockMoves",
    "BlockPool",
    "BlockSpace",
    "BlockTable",
    "Device",
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
    "take",
    "withdraw",
]

Device = Literal["gpu", "cpu"]
BlockMoves = tuple[tuple[int, int], ...]
"""Source and destination block of each copy, in the order in which they are to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPool:
    """The blocks of one device.

    Attributes
    ----------
    free : tuple of int
        Free blocks, next to be given out first.
    ref_counts : tuple of int
        Holders of each block, by block id.
    """

    free: tuple[int, ...]
    ref_counts: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks in all, free or not."""
        return len(self.ref_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """The blocks of one sequence.

    Attributes
    ----------
    device : {"gpu", "cpu"}
        Where all of them are.
    blocks : tuple of int
        Block ids, in order of the tokens they hold.
    num_full_slots : int
        Tokens that were given a slot; only the newer manager keeps this number.
    """

    device: Device = "gpu"
    blocks: tuple[int, ...]
    num_full_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpace:
    """Both pools and all block tables.

    Attributes
    ----------
    config : V0CacheConfig
    gpu, cpu : BlockPool
    tables : mapping of int to BlockTable
        By sequence id.
    """

    config: V0CacheConfig
    gpu: BlockPool
    cpu: BlockPool
    tables: Mapping[int, BlockTable] = field(default_factory=dict)


def initial_space(config: V0CacheConfig) -> BlockSpace:
    """Return a space in which every block is free; the highest id of a pool is given out first."""
    return BlockSpace(
        config=config, gpu=_full_pool(config.num_gpu_blocks), cpu=_full_pool(config.num_cpu_blocks)
    )


def _full_pool(num_blocks: int) -> BlockPool:
    return BlockPool(free=tuple(reversed(range(num_blocks))), ref_counts=(0,) * num_blocks)


def take(pool: BlockPool, count: int, holders: int = 1) -> tuple[BlockPool, tuple[int, ...]]:
    """Take free blocks for a number of holders.

    Parameters
    ----------
    pool : BlockPool
        With at least `count` free blocks.
    count : int
    holders : int
        Reference count that the blocks start with.

    Returns
    -------
    BlockPool
    tuple of int
        The blocks in the order taken.
    """
    blocks = pool.free[:count]
    counts = list(pool.ref_counts)
    for block in blocks:
        counts[block] = holders
    return BlockPool(free=pool.free[count:], ref_counts=tuple(counts)), blocks


def withdraw(pool: BlockPool, blocks: Iterable[int]) -> BlockPool:
    """Give up one holder of each block, in order; a block without holders is free."""
    counts = list(pool.ref_counts)
    freed: list[int] = []
    for block in blocks:
        counts[block] -= 1
        if counts[block] == 0:
            freed.append(block)
    return BlockPool(free=(*reversed(freed), *pool.free), ref_counts=tuple(counts))


def can_allocate(space: BlockSpace, num_tokens: int) -> AllocStatus:
    """Tell whether a prompt gets its blocks: whole, and with the watermark left free.

    Parameters
    ----------
    space : BlockSpace
    num_tokens : int
        Prompt and earlier output of the sequence, all of which get slots at once, also when the
        prompt is computed in chunks.

    Returns
    -------
    AllocStatus
        NEVER if not even the empty pool would do.
    """
    required = _blocks_of(space, num_tokens)
    if space.gpu.num_blocks - required < space.config.watermark_blocks:
        return AllocStatus.NEVER
    if len(space.gpu.free) - required >= space.config.watermark_blocks:
        return AllocStatus.OK
    return AllocStatus.LATER


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
    gpu, blocks = take(space.gpu, _blocks_of(space, num_tokens), holders=num_seqs)
    return _with_table(replace(space, gpu=gpu), seq_id, BlockTable(blocks=blocks))


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
    if len(table.blocks) < _blocks_of(space, num_tokens):
        gpu, new = take(space.gpu, 1)
        return _with_blocks(replace(space, gpu=gpu), seq_id, (*table.blocks, *new)), ()
    last = table.blocks[-1]
    if space.gpu.ref_counts[last] == 1:
        return space, ()
    gpu, new = take(space.gpu, 1)
    space = replace(space, gpu=withdraw(gpu, (last,)))
    return _with_blocks(space, seq_id, (*table.blocks[:-1], *new)), ((last, new[0]),)


def fork(space: BlockSpace, parent_seq_id: int, child_seq_id: int) -> BlockSpace:
    """Let a new sequence hold all blocks of its parent."""
    table = space.tables[parent_seq_id]
    counts = list(space.gpu.ref_counts)
    for block in table.blocks:
        counts[block] += 1
    gpu = replace(space.gpu, ref_counts=tuple(counts))
    return _with_table(replace(space, gpu=gpu), child_seq_id, table)


def free(space: BlockSpace, seq_id: int) -> BlockSpace:
    """Give up a sequence's blocks, first block first; nothing if it holds none.

    The release iterates over a Python set of block objects, whose order differs from process to
    process; the order of the table is one that it can take.
    """
    if seq_id not in space.tables:
        return space
    table = space.tables[seq_id]
    tables = {key: value for key, value in space.tables.items() if key != seq_id}
    if table.device == "gpu":
        return replace(space, gpu=withdraw(space.gpu, table.blocks), tables=tables)
    return replace(space, cpu=withdraw(space.cpu, table.blocks), tables=tables)


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
    required = len(_distinct_blocks(space, seq_ids)) + len(seq_ids)
    if space.gpu.num_blocks < required:
        return AllocStatus.NEVER
    if len(space.gpu.free) - required >= space.config.watermark_blocks:
        return AllocStatus.OK
    return AllocStatus.LATER


def swap_in(space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences from the CPU to the GPU; shared blocks stay shared.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        CPU block and GPU block of each move.
    """
    cpu, gpu, tables, moves = _move(space.cpu, space.gpu, space.tables, seq_ids, "gpu")
    return replace(space, cpu=cpu, gpu=gpu, tables=tables), moves


def can_swap_out(space: BlockSpace, seq_ids: Sequence[int]) -> bool:
    """Tell whether the CPU pool has room for all blocks of a group."""
    return len(_distinct_blocks(space, seq_ids)) <= len(space.cpu.free)


def swap_out(space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences from the GPU to the CPU; shared blocks stay shared.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        GPU block and CPU block of each move.
    """
    gpu, cpu, tables, moves = _move(space.gpu, space.cpu, space.tables, seq_ids, "cpu")
    return replace(space, cpu=cpu, gpu=gpu, tables=tables), moves


def _move(
    source: BlockPool,
    target: BlockPool,
    tables: Mapping[int, BlockTable],
    seq_ids: Sequence[int],
    device: Device,
) -> tuple[BlockPool, BlockPool, Mapping[int, BlockTable], BlockMoves]:
    moved: dict[int, int] = {}
    tables = dict(tables)
    for seq_id in seq_ids:
        blocks = tables[seq_id].blocks
        fresh = tuple(block for block in blocks if block not in moved)
        target, given = take(target, len(fresh), holders=0)
        moved.update(zip(fresh, given, strict=True))
        counts = list(target.ref_counts)
        for block in blocks:
            counts[moved[block]] += 1
        target = replace(target, ref_counts=tuple(counts))
        source = withdraw(source, blocks)
        tables[seq_id] = BlockTable(device=device, blocks=tuple(moved[b] for b in blocks))
    return source, target, tables, tuple(moved.items())


def _blocks_of(space: BlockSpace, num_tokens: int) -> int:
    return -(-num_tokens // space.config.block_size)


def _distinct_blocks(space: BlockSpace, seq_ids: Sequence[int]) -> set[int]:
    return {block for seq_id in seq_ids for block in space.tables[seq_id].blocks}


def _with_table(space: BlockSpace, seq_id: int, table: BlockTable) -> BlockSpace:
    return replace(space, tables={**space.tables, seq_id: table})


def _with_blocks(space: BlockSpace, seq_id: int, blocks: tuple[int, ...]) -> BlockSpace:
    return _with_table(space, seq_id, replace(space.tables[seq_id], blocks=blocks))
