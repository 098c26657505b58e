"""Choosing tokens.

Source: ``Sampler.greedy_sample`` of ``vllm/v1/sample/sampler.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["greedy"]


def greedy(logits: npt.NDArray[np.floating]) -> tuple[int, ...]:
    """Index of the largest logit of every row; among equals the lowest index.

    The tie rule makes the choice a function of the logits alone, so that two implementations can
    be compared.

    Parameters
    ----------
    logits : numpy.ndarray
        ``[rows, vocab_size]``.

    Returns
    -------
    tuple of int
        One token a row.

    Raises
    ------
    ValueError
        If a logit is not a number: no token would be the right one.
    """
    broken = np.flatnonzero(np.isnan(logits).any(axis=-1))
    if broken.size:
        raise ValueError(f"logits of row {broken[0]} contain NaN")
    return tuple(int(token) for token in np.argmax(logits, axis=-1))
