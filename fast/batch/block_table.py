"""The block tables of one group, a row for each known request, in kernel blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servespec.fast.batch.buffers import POISON, IntArray, grown

__all__ = ["BlockTable"]


class BlockTable:
    """Kernel blocks of every request; behind the last one a row is filled with the null block.

    A pool block of ``block_size`` tokens is kept as ``ratio`` consecutive kernel blocks, expanded
    once, when it arrives.

    Parameters
    ----------
    num_slots : int
        Rows to begin with.
    width : int
        Pool blocks a row to begin with.
    block_size : int
        Tokens in a pool block.
    kernel_block_size : int
        Tokens in a kernel block; divides `block_size`.

    Notes
    -----
    Source: ``vllm/v1/worker/block_table.py``.
    """

    def __init__(self, num_slots: int, width: int, block_size: int, kernel_block_size: int) -> None:
        self.block_size = block_size
        self.kernel_block_size = kernel_block_size
        self.ratio = block_size // kernel_block_size
        self.ids = np.zeros((num_slots, max(1, width) * self.ratio), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self._parts = np.arange(self.ratio, dtype=np.int32)

    def grow_slots(self, num_slots: int) -> None:
        """Make room for more requests."""
        self.ids = grown(self.ids, 0, num_slots)
        self.num_blocks = grown(self.num_blocks, 0, num_slots)

    def replace(self, slot: int, block_ids: Sequence[int]) -> None:
        """Make pool blocks the whole table of a request."""
        self.num_blocks[slot] = 0
        # The slot may have served a longer table before.
        self.ids[slot] = 0
        self.append(slot, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Append pool blocks to the table of a request."""
        start = int(self.num_blocks[slot])
        end = start + len(block_ids) * self.ratio
        self.ids = grown(self.ids, 1, end)
        if self.ratio == 1:
            self.ids[slot, start:end] = block_ids
        elif end > start:
            first = np.asarray(block_ids, np.int32)[:, None] * self.ratio
            self.ids[slot, start:end] = (first + self._parts).reshape(-1)
        self.num_blocks[slot] = end

    def poison(self, slots: Sequence[int]) -> None:
        """Overwrite the rows of slots that nobody holds."""
        self.ids[slots] = POISON
        self.num_blocks[slots] = 0

    def slots_of(self, token_slots: IntArray, positions: IntArray) -> IntArray:
        """Return where tokens live in the cache.

        Parameters
        ----------
        token_slots : numpy.ndarray
            ``[T]``, the request slot of each token.
        positions : numpy.ndarray
            ``[T]``, its position in the request.

        Returns
        -------
        numpy.ndarray
            ``[T]`` int64, ``kernel block * kernel block size + offset``.
        """
        column, offset = np.divmod(positions, self.kernel_block_size)
        blocks = self.ids[token_slots, column].astype(np.int64)
        blocks *= self.kernel_block_size
        blocks += offset
        return blocks

    def columns(self, slots: IntArray, starts: IntArray, count: int) -> IntArray:
        """Return some consecutive blocks of each request.

        Parameters
        ----------
        slots : numpy.ndarray
            ``[R]``.
        starts : numpy.ndarray
            ``[R]``, first column of each.
        count : int

        Returns
        -------
        numpy.ndarray
            ``[R, count]`` int32.
        """
        if len(starts):
            self.ids = grown(self.ids, 1, int(starts.max()) + count)
        chosen: IntArray = self.ids[slots[:, None], starts[:, None] + np.arange(count)]
        return chosen

    def pool_blocks(self, slot: int) -> tuple[int, ...]:
        """Return the table of a request in pool blocks."""
        held = self.ids[slot, : self.num_blocks[slot] : self.ratio] // self.ratio
        return tuple(held.tolist())
