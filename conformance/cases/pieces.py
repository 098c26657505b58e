"""Which parts of a sequence to try to do without, the largest ones first."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pieces"]


def pieces(length: int, largest: int) -> Iterator[slice]:
    """Yield slices that cover a sequence: of the largest size, of half that size, to single items.

    Parameters
    ----------
    length : int
        Items in the sequence.
    largest : int
        Items of the first slices; nothing is yielded if it is 0.

    Yields
    ------
    slice
    """
    size = largest
    while size >= 1:
        for start in range(0, length, size):
            yield slice(start, start + size)
        size //= 2
