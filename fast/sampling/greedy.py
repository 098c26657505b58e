"""Greedy sampling."""

from __future__ import annotations

from torch import Tensor

__all__ = ["greedy", "require_numbers"]


def greedy(logits: Tensor) -> Tensor:
    """Return the token with the greatest logit, the lowest id among equals.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``.

    Returns
    -------
    Tensor
        ``[R]`` int64; of a row with NaN, where the first is.
    """
    # torch documents the first index for equal maxima, and takes NaN for the greatest.
    return logits.argmax(dim=-1)


def require_numbers(logits: Tensor, tokens: Tensor) -> None:
    """Require that logits are numbers: of others no token would be the right one.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]``.
    tokens : Tensor
        ``[R]``, what `greedy` makes of them.

    Raises
    ------
    ValueError
    """
    broken = logits.gather(-1, tokens[:, None]).isnan()
    if bool(broken.any()):
        raise ValueError(f"logits of row {int(broken.int().argmax())} contain NaN")
