"""Greedy sampling."""

from __future__ import annotations

from torch import Tensor

__all__ = ["greedy"]


def greedy(logits: Tensor) -> Tensor:
    """Return the token with the greatest logit, the lowest id among equals.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``.

    Returns
    -------
    Tensor
        ``[R]`` int64.
    """
    # torch documents the first index for equal maxima.
    return logits.argmax(dim=-1)
