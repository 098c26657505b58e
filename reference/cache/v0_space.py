"""What both V0 block managers keep and do alike: pools, tables, admission, forks, swaps.

A free block is taken from the top of a stack and put back on top, so the block freed last is
given out first. Forked sequences share blocks; a block knows only how many hold it.

Source: ``vllm/core/block_manager_v1.py`` and ``vllm/core/block_manager_v2.py`` of vLLM 0.5.1,
without prefix caching, sliding windows and cross attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig, V0SchedulingError

__all__ = [
    "BlockMoves",
    "BlockPool",
    "BlockSpace",
    "BlockTable",
    "Device",
    "blocks_for",
    "can_allocate",
    "can_swap_out",
    "distinct_blocks",
    "fork",
    "free",
    "free_space",
    "hold",
    "swap",
    "swap_in_status",
    "take",
    "take_or_fail",
    "with_table",
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


def free_space(config: V0CacheConfig, *, highest_first: bool) -> BlockSpace:
    """Return a space in which every block is free, stacked from one end of the ids."""

    def pool(num_blocks: int) -> BlockPool:
        ids = range(num_blocks)
        return BlockPool(
            free=tuple(reversed(ids) if highest_first else ids), ref_counts=(0,) * num_blocks
        )

    return BlockSpace(
        config=config, gpu=pool(config.num_gpu_blocks), cpu=pool(config.num_cpu_blocks)
    )


def blocks_for(space: BlockSpace, num_tokens: int) -> int:
    """Return how many blocks hold a number of tokens."""
    return -(-num_tokens // space.config.block_size)


def distinct_blocks(space: BlockSpace, seq_ids: Sequence[int]) -> set[int]:
    """Return the blocks of sequences, those they share once."""
    return {block for seq_id in seq_ids for block in space.tables[seq_id].blocks}


def with_table(space: BlockSpace, seq_id: int, table: BlockTable) -> BlockSpace:
    """Give a sequence a table in place of what it had."""
    return replace(space, tables={**space.tables, seq_id: table})


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


def hold(pool: BlockPool, blocks: Iterable[int]) -> BlockPool:
    """Add one holder to each block."""
    counts = list(pool.ref_counts)
    for block in blocks:
        counts[block] += 1
    return replace(pool, ref_counts=tuple(counts))


def take_or_fail(pool: BlockPool, count: int, seq_id: int) -> tuple[BlockPool, tuple[int, ...]]:
    """Take free blocks for a sequence that may find too few.

    Raises
    ------
    V0SchedulingError
        ``pool_exhausted``.
    """
    if count > len(pool.free):
        raise V0SchedulingError(
            "pool_exhausted",
            f"sequence {seq_id} needs {count} more blocks and {len(pool.free)} are free",
        )
    return take(pool, count)


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
    required = blocks_for(space, num_tokens)
    if space.gpu.num_blocks - required < space.config.watermark_blocks:
        return AllocStatus.NEVER
    return _ok_or_later(space, required)


def fork(space: BlockSpace, parent_seq_id: int, child_seq_id: int) -> BlockSpace:
    """Let a new sequence hold all blocks of its parent."""
    table = space.tables[parent_seq_id]
    space = replace(space, gpu=hold(space.gpu, table.blocks))
    return with_table(space, child_seq_id, table)


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


def can_swap_out(space: BlockSpace, seq_ids: Sequence[int]) -> bool:
    """Tell whether the CPU pool has room for the blocks of a group, shared ones counted once."""
    return len(distinct_blocks(space, seq_ids)) <= len(space.cpu.free)


def swap_in_status(space: BlockSpace, required: int) -> AllocStatus:
    """Tell whether so many GPU blocks can be had for a swapped group.

    Unlike an admission, a swap-in is hopeless only if the whole pool is too small for it; one
    that would have to break into the watermark of an empty pool is put off forever.
    """
    if space.gpu.num_blocks < required:
        return AllocStatus.NEVER
    return _ok_or_later(space, required)


def swap(
    space: BlockSpace, seq_ids: Sequence[int], device: Device, *, keep_shared: bool
) -> tuple[BlockSpace, BlockMoves]:
    """Move the blocks of sequences to a device from the other one.

    Parameters
    ----------
    space : BlockSpace
    seq_ids : sequence of int
        Sequences that hold blocks of the other device.
    device : {"gpu", "cpu"}
        Where the blocks go.
    keep_shared : bool
        Whether a block that sequences share moves once and stays shared; otherwise it moves once
        for each of them.

    Returns
    -------
    BlockSpace
    tuple of (int, int)
        The block on either device of each move.

    Raises
    ------
    V0SchedulingError
        ``pool_exhausted`` if the free blocks do not suffice, which the managers' checks exclude
        as long as shared blocks stay shared.
    """
    source, target = (space.cpu, space.gpu) if device == "gpu" else (space.gpu, space.cpu)
    tables = dict(space.tables)
    moves: list[tuple[int, int]] = []
    moved: dict[int, int] = {}
    for seq_id in seq_ids:
        table = tables[seq_id]
        if not keep_shared:
            moved = {}
        shared = tuple(moved[block] for block in table.blocks if block in moved)
        fresh = tuple(block for block in table.blocks if block not in moved)
        target, given = take_or_fail(target, len(fresh), seq_id)
        target = hold(target, shared)
        source = withdraw(source, table.blocks)
        moves += zip(fresh, given, strict=True)
        moved.update(zip(fresh, given, strict=True))
        blocks = tuple(moved[block] for block in table.blocks)
        tables[seq_id] = replace(table, device=device, blocks=blocks)
    cpu, gpu = (source, target) if device == "gpu" else (target, source)
    return replace(space, cpu=cpu, gpu=gpu, tables=tables), tuple(moves)


def _ok_or_later(space: BlockSpace, required: int) -> AllocStatus:
    if len(space.gpu.free) - required >= space.config.watermark_blocks:
        return AllocStatus.OK
    return AllocStatus.LATER
