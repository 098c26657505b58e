"""The scheduler's block pool: reference counts, prefix hashes and the two-ended free queue.

The rules are those of ``BlockPool`` and ``FreeKVCacheBlockQueue`` of
``vllm/v1/core/block_pool.py`` and ``kv_cache_utils.py``; the layout is not. The free queue is one
array with room at both ends, so that taking, prepending and appending n blocks are slices; a
block taken from the middle leaves a hole, which costs O(1) now and is squeezed out later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["NULL_BLOCK", "BlockPool", "FreeQueue", "IntArray"]

IntArray = npt.NDArray[np.int64]

NULL_BLOCK = 0
"""Block that pads tables; it is never handed out and its holders are not counted."""

_HOLE = -1


class FreeQueue:
    """Free blocks in the order in which they will be handed out.

    Parameters
    ----------
    num_blocks : int
        Block ids are below this number.
    first : int
        Ids ``first .. num_blocks - 1`` are free in the beginning, in ascending order.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        self._buffer: IntArray = np.full(3 * num_blocks, _HOLE, dtype=np.int64)
        self._position: IntArray = np.full(num_blocks, _HOLE, dtype=np.int64)
        self._head = self._tail = num_blocks
        self._holes = 0
        self.append(np.arange(first, num_blocks, dtype=np.int64))

    def __len__(self) -> int:
        return self._tail - self._head - self._holes

    def pop(self, count: int) -> IntArray:
        """Take `count` blocks from the head; the caller has checked that there are as many.

        Returns
        -------
        array of int64, shape (count,)
        """
        head = self._head
        if self._holes == 0:
            ids = self._buffer[head : head + count].copy()
            self._head = head + count
        else:
            window = self._buffer[head : min(head + count + self._holes, self._tail)]
            places = np.flatnonzero(window != _HOLE)[:count]
            ids = window[places]
            used = int(places[-1]) + 1 if count else 0
            self._head = head + used
            self._holes -= used - count
        self._position[ids] = _HOLE
        return ids

    def append(self, ids: IntArray) -> None:
        """Put blocks at the tail, in the order given."""
        if self._tail + len(ids) > len(self._buffer):
            self._recentre()
        end = self._tail + len(ids)
        self._buffer[self._tail : end] = ids
        self._position[ids] = np.arange(self._tail, end)
        self._tail = end

    def prepend(self, ids: IntArray) -> None:
        """Put blocks at the head, the first of `ids` foremost."""
        if self._head < len(ids):
            self._recentre()
        start = self._head - len(ids)
        self._buffer[start : self._head] = ids
        self._position[ids] = np.arange(start, self._head)
        self._head = start

    def remove(self, block: int) -> None:
        """Take one block out of the middle."""
        self._buffer[self._position[block]] = _HOLE
        self._position[block] = _HOLE
        self._holes += 1

    def to_array(self) -> IntArray:
        """Return the queue, head first.

        Returns
        -------
        array of int64, shape (len(self),)
        """
        window = self._buffer[self._head : self._tail]
        live: IntArray = window[window != _HOLE]
        return live

    def _recentre(self) -> None:
        live = self.to_array()
        # A third of the buffer stays free on either side, so this is paid for by as many pushes.
        self._head = (len(self._buffer) - len(live)) // 2
        self._tail = self._head + len(live)
        self._holes = 0
        self._buffer[self._head : self._tail] = live
        self._position[live] = np.arange(self._head, self._tail)


class BlockPool:
    """All blocks of the K/V cache.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool, the null block included.
    enable_caching : bool
        Whether blocks may carry prefix hashes. It also decides where blocks without a hash go
        when they are freed: to the head with caching, to the tail without.

    Attributes
    ----------
    ref_counts : array of int64, shape (num_blocks,)
        Holders of each block; that of the null block stays 0.
    free : FreeQueue

    Notes
    -----
    A block has at most one primary key and any number of further ones (partial hits). Equal
    content in several blocks is not merged: a key maps to all its blocks and finds the one that
    was entered first. Source: ``BlockPool`` and ``BlockHashToBlockMap`` of
    ``vllm/v1/core/block_pool.py``.
    """

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ref_counts: IntArray = np.zeros(num_blocks, dtype=np.int64)
        self.free = FreeQueue(num_blocks)
        self._hashed: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._key: dict[int, bytes] = {}
        self._key_tokens: dict[int, int] = {}
        self._further_keys: dict[int, dict[bytes, None]] = {}
        self._blocks_of: dict[bytes, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self.free)

    def allocate(self, count: int) -> IntArray:
        """Take `count` blocks from the head of the queue; they lose their hashes.

        Returns
        -------
        array of int64, shape (count,)

        Raises
        ------
        ValueError
            If fewer are free.
        """
        if count > len(self.free):
            raise ValueError(f"cannot take {count} blocks: only {len(self.free)} are free")
        ids = self.free.pop(count)
        if self._key:
            for block in ids[self._hashed[ids]].tolist():
                self.drop_keys(block)
        self.ref_counts[ids] = 1
        return ids

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a holder to each block, taking those without one out of the free queue."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self.free.remove(block)
            self.ref_counts[block] += 1

    def release(self, ids: IntArray) -> None:
        """Take a holder from each block; those left without one become free.

        With caching, blocks without a hash go to the head (they can never be hit) and blocks with
        one to the tail, both in the order given. Null blocks are ignored.

        Parameters
        ----------
        ids : array of int64, shape (n,)
            No block may stand in it twice, the null block excepted.
        """
        ids = ids[ids != NULL_BLOCK]
        self.ref_counts[ids] -= 1
        ids = ids[self.ref_counts[ids] == 0]
        if self.enable_caching:
            hashed = self._hashed[ids]
            self.free.prepend(ids[~hashed])
            ids = ids[hashed]
        self.free.append(ids)

    def release_repeated(self, blocks: Sequence[int]) -> None:
        """Like `release`, for a list in which a block may stand several times."""
        freed = []
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                freed.append(block)
        ids = np.array(freed, dtype=np.int64)
        self.ref_counts[ids] = 1
        self.release(ids)

    def num_evictable(self, blocks: Sequence[int]) -> int:
        """Count the blocks (nulls excepted) that a touch would take out of the free queue."""
        return sum(block != NULL_BLOCK and self.ref_counts[block] == 0 for block in blocks)

    def find(self, key: bytes) -> int | None:
        """Return the first block entered under `key`, or None."""
        blocks = self._blocks_of.get(key)
        return next(iter(blocks)) if blocks else None

    def goes_to_tail(self, blocks: IntArray) -> npt.NDArray[np.bool_]:
        """Return which blocks would be freed to the tail of the queue, in the shape of `blocks`."""
        hashed: npt.NDArray[np.bool_] = self._hashed[blocks]
        return hashed if self.enable_caching else np.ones(blocks.shape, dtype=np.bool_)

    def key(self, block: int) -> bytes | None:
        """Return the primary key of a block."""
        return self._key.get(block)

    def key_tokens(self, block: int) -> int:
        """Return the length of the prefix that the primary key stands for; 0 without a key."""
        return self._key_tokens.get(block, 0)

    def holds_key(self, block: int, key: bytes) -> bool:
        """Whether `key` finds (also) this block."""
        return block in self._blocks_of.get(key, ())

    def add_key(self, block: int, key: bytes, num_tokens: int) -> bool:
        """Enter a block under `key`, as its primary key if it has none.

        Parameters
        ----------
        block : int
        key : bytes
        num_tokens : int
            Length of the prefix the key stands for.

        Returns
        -------
        bool
            False if it was entered before.
        """
        blocks = self._blocks_of.setdefault(key, {})
        if block in blocks:
            return False
        if block in self._key:
            self._further_keys.setdefault(block, {})[key] = None
        else:
            self._key[block] = key
            self._key_tokens[block] = num_tokens
            self._hashed[block] = True
        blocks[block] = None
        return True

    def drop_keys(self, block: int) -> list[bytes]:
        """Forget all keys of a block and return them, the primary one first."""
        primary = self._key.pop(block, None)
        if primary is None:
            return []
        keys = [primary, *self._further_keys.pop(block, ())]
        for key in keys:
            blocks = self._blocks_of[key]
            del blocks[block]
            if not blocks:
                del self._blocks_of[key]
        del self._key_tokens[block]
        self._hashed[block] = False
        return keys

    def move_keys(self, src: int, dst: int) -> None:
        """Let `dst`, which has no key, take over all keys of `src`."""
        num_tokens = self.key_tokens(src)
        for key in self.drop_keys(src):
            self.add_key(dst, key, num_tokens)

    def reset_keys(self) -> bool:
        """Forget all keys if no block is held; otherwise change nothing and return False."""
        if len(self.free) != self.num_blocks - 1:
            return False
        self._hashed[:] = False
        self._key.clear()
        self._key_tokens.clear()
        self._further_keys.clear()
        self._blocks_of.clear()
        return True

    def cached_blocks(self) -> frozenset[int]:
        """Return the blocks that some key finds."""
        return frozenset(self._key)
