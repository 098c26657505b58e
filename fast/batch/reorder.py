"""Decode-first order in place: a key for each row, and swaps for the rows out of place.

Source: ``reorder_batch_to_split_decodes_and_prefills`` of ``vllm/v1/attention/backends/utils.py``.
"""

from __future__ import annotations

import numpy as np

from servespec.fast.batch.buffers import IntArray

__all__ = ["region_keys", "swaps_to_sort"]


def region_keys(
    computed: IntArray, scheduled: IntArray, prompt: IntArray, threshold: int
) -> IntArray:
    """Return 0 for a decode, 1 for a short extend, 2 for a long extend, 3 for a first chunk.

    Parameters
    ----------
    computed, scheduled, prompt : numpy.ndarray
        ``[R]`` tokens.
    threshold : int
        Most tokens of a decode or short extend.

    Returns
    -------
    numpy.ndarray
        ``[R]`` int8.
    """
    keys = (computed < prompt).astype(np.int8)
    keys[scheduled > threshold] = 2
    keys[computed == 0] = 3
    return keys


def swaps_to_sort(keys: IntArray) -> list[tuple[int, int]]:
    """Return swaps that sort the keys, moving only rows that are out of place.

    Parameters
    ----------
    keys : numpy.ndarray
        ``[R]``; left as it is.

    Returns
    -------
    list of (int, int)
        In order: along each cycle of misplaced rows, its first row changes with one after another.
    """
    (holes,) = np.nonzero(keys != np.sort(keys))
    if not len(holes):
        return []
    arrivals = holes[np.argsort(keys[holes], kind="stable")]
    goes_to = np.empty(len(keys), np.int64)
    goes_to[arrivals] = holes
    swaps = []
    for row in arrivals.tolist():
        at = int(goes_to[row])
        while at != row:
            swaps.append((row, at))
            following = int(goes_to[at])
            # A row that has come home begins no cycle of its own.
            goes_to[at] = at
            at = following
    return swaps
