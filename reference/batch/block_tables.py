"""From the blocks of the pool to what the kernels index: kernel blocks and slots.

Source: ``vllm/v1/worker/block_table.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["kernel_blocks", "pad_table", "slot", "state_columns"]


def kernel_blocks(block_ids: Iterable[int], blocks_per_block: int) -> tuple[int, ...]:
    """Expand blocks of the pool into the smaller blocks a kernel works with.

    A hybrid model's pool block is as large as a GDN state; attention kernels take it as
    `blocks_per_block` consecutive blocks: ``b`` becomes ``b k, b k + 1, ..., b k + k - 1``.

    Parameters
    ----------
    block_ids : iterable of int
    blocks_per_block : int
        k, tokens of a pool block over tokens of a kernel block.

    Returns
    -------
    tuple of int
    """
    return tuple(
        block_id * blocks_per_block + part
        for block_id in block_ids
        for part in range(blocks_per_block)
    )


def pad_table(table: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Fill the rows of a block table with the null block 0 up to the longest row.

    Parameters
    ----------
    table : sequence of sequence of int

    Returns
    -------
    tuple of tuple of int
    """
    width = max((len(row) for row in table), default=0)
    return tuple((*row, *(0,) * (width - len(row))) for row in table)


def slot(kernel_block_ids: Sequence[int], position: int, kernel_block_size: int) -> int:
    """Return where a token's K/V lives: its block's first slot plus the offset inside the block.

    Parameters
    ----------
    kernel_block_ids : sequence of int
        The request's table of kernel blocks.
    position : int
        Of the token in its request, from 0.
    kernel_block_size : int
        Tokens in a kernel block.

    Returns
    -------
    int
    """
    block = kernel_block_ids[position // kernel_block_size]
    return block * kernel_block_size + position % kernel_block_size


def state_columns(
    block_ids: Sequence[int], seq_len: int, num_spec: int, block_size: int | None
) -> tuple[int, ...]:
    """Return the state blocks a GDN layer works on in this step.

    Without aligned states a request holds ``1 + num_spec`` blocks for life. With them the table
    has a block for each `block_size` tokens, and the step works on the one that holds its last
    token and the ones behind it (``mamba_get_block_table_tensor``).

    Parameters
    ----------
    block_ids : sequence of int
        The request's blocks in a GDN group.
    seq_len : int
        Tokens computed after the step, drafts included.
    num_spec : int
        Most drafts of a row.
    block_size : int or None
        Tokens of a state block in mode ``align``; None in mode ``none``.

    Returns
    -------
    tuple of int
        ``1 + num_spec`` block ids; the null block where the table ends early.
    """
    start = 0 if block_size is None else max(0, (seq_len - 1) // block_size)
    columns = tuple(block_ids[start : start + 1 + num_spec])
    return columns + (0,) * (1 + num_spec - len(columns))
