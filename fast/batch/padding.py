"""Dummy rows in place, at the end of the cumulative lengths.

Source: ``_pad_query_start_loc_for_fia`` of ``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

import numpy as np

from servespec.fast.batch.buffers import IntArray
from servespec.reference.contracts import GraphMode

__all__ = ["pad_rows"]


def pad_rows(
    starts: IntArray,
    num_reqs: int,
    num_tokens: int,
    captured_reqs: int | None,
    mode: GraphMode,
    query_len: int,
) -> int:
    """Write the dummy rows of a padded step behind its rows.

    Parameters
    ----------
    starts : numpy.ndarray
        Cumulative lengths with room for the dummies; the first ``num_reqs + 1`` are the step's.
    num_reqs : int
        R.
    num_tokens : int
        Tokens the step is padded to.
    captured_reqs : int or None
        Rows the graph was captured for; None means R.
    mode : str
        The configured mode; graphs of mode ``FULL`` are not captured row by row.
    query_len : int
        Tokens of a row in a uniform decode.

    Returns
    -------
    int
        Rows with dummies.
    """
    last = starts[num_reqs]
    if mode != "FULL":
        rows = num_reqs if captured_reqs is None else captured_reqs
        if rows * query_len == num_tokens:
            starts[num_reqs + 1 : rows + 1] = last + query_len * np.arange(1, rows - num_reqs + 1)
            return max(rows, num_reqs)
    if last == num_tokens:
        return num_reqs
    starts[num_reqs + 1] = num_tokens
    return num_reqs + 1
