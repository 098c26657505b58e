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

    Raises
    ------
    ValueError
        A logit is not a number: no token would be the right one.
    """
    # torch documents the first index for equal maxima, and takes NaN for the greatest.
    tokens = logits.argmax(dim=-1)
    broken = logits.gather(-1, tokens[:, None]).isnan()
    if bool(broken.any()):
        raise ValueError(f"logits of row {int(broken.int().argmax())} contain NaN")
    return tokens
