"""Blocks for many running requests at once.

A running request that decodes needs at most one block of each group in a step and gives up at
most two states of each GDN group. Where that is all, requests can be served together: blocks are
taken from the head of the free queue in one go and laid out as if the requests had come one after
the other. Nothing given up may be taken again in the same go, which holds as long as it goes to
the tail and the queue is long enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import NULL_BLOCK, IntArray

if TYPE_CHECKING:
    from servespec.fast.cache.coordinator import KVCache

__all__ = ["Together"]


class Together:
    """What some running requests need in this step, before any of them is served.

    Parameters
    ----------
    cache : KVCache
    slots : array of int64, shape (n,)
    ends : array of int64, shape (n,)
        Computed tokens of each request after the step.
    known : array of int64, shape (n,)
        Known tokens of each.
    processed : array of int64, shape (n,)
        Tokens of each whose step is over.

    Attributes
    ----------
    simple : array of bool, shape (n,)
        Whether a request can be served together with others.
    """

    def __init__(
        self, cache: KVCache, slots: IntArray, ends: IntArray, known: IntArray, processed: IntArray
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._ends = ends
        self._known = known
        self._current = (processed - 1) // cache.block_size
        self._missing = cache.missing(slots, ends)
        self.simple: npt.NDArray[np.bool_] = np.all(self._missing <= 1, axis=1)
        if cache.fine:
            self.simple[:] = False
        self._given_up: IntArray = np.zeros((len(slots), 0), dtype=np.int64)
        if cache.aligned:
            found = [group.given_up(slots, self._current) for group in cache.aligned_groups]
            self._given_up = np.concatenate([blocks for blocks, _ in found], axis=1)
            for _, simple in found:
                self.simple &= simple
            pool = cache.pool
            blocks = self._given_up
            # A block freed to the head would be taken again at once; one with other holders stays.
            alone = pool.goes_to_tail(blocks) & (pool.ref_counts[blocks] == 1)
            fit = alone | (blocks == NULL_BLOCK)
            self.simple &= fit.all(axis=1)

    def serve(self, first: int, last: int) -> IntArray | None:
        """Serve the requests from `first` up to `last`, all of them simple.

        Returns
        -------
        array of int64, shape (last - first, number of groups), or None
            The new block of each request and group, 0 where there is none; None, with nothing
            changed, if the pool has too few blocks.
        """
        cache, rows = self._cache, slice(first, last)
        needs = self._missing[rows] > 0
        total = int(needs.sum())
        if total > cache.pool.num_free:
            return None
        slots = self._slots[rows]
        if cache.aligned:
            blocks = self._given_up[rows].reshape(-1)
            for group in cache.aligned_groups:
                group.give_up(slots, self._current[rows])
            cache.pool.release(blocks)
            cache.skip_mark[slots] = self._current[rows]
        new: IntArray = np.zeros(needs.shape, dtype=np.int64)
        if total:
            # Row by row, and within a row group by group: the order of a mask.
            new[needs] = cache.pool.allocate(total)
            for index in np.flatnonzero(needs.any(axis=0)).tolist():
                growing = needs[:, index]
                cache.groups[index].append_each(slots[growing], new[growing, index])
            cache.note_room(slots)
        if cache.hashing:
            ends = self._ends[rows]
            lengths = np.minimum(ends, self._known[rows])
            due = np.flatnonzero(lengths >= cache.cache_at[slots])
            for place in due.tolist():
                cache.cache(int(slots[place]), int(lengths[place]), int(ends[place]))
        return new
