"""Boundaries between decodes and prefills.

Source: ``split_decodes_and_prefills`` of ``vllm/v1/attention/backends/utils.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.fast.batch.buffers import IntArray

__all__ = ["leading_decodes"]


def leading_decodes(
    query_lens: IntArray, threshold: int, prefilling: npt.NDArray[np.bool_] | None = None
) -> int:
    """Return how many rows stand before the first one that is no decode.

    Parameters
    ----------
    query_lens : numpy.ndarray
        ``[R]`` tokens of each row.
    threshold : int
        Most tokens of a decode.
    prefilling : numpy.ndarray or None
        ``[R]`` bool, rows inside their prompt, where those are no decodes.

    Returns
    -------
    int
    """
    longer = query_lens > threshold
    if prefilling is not None:
        longer |= prefilling
    return int(longer.argmax()) if longer.any() else len(longer)
