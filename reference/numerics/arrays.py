"""The one array type of the reference: float64 that nobody can write to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "frozen"]

Array = npt.NDArray[np.float64]


def frozen(values: npt.ArrayLike) -> Array:
    """Return `values` as a read-only float64 array.

    Results are frozen, so that a value handed on can never change under its other holders; this
    is what lets memories share what a step left alone.

    Parameters
    ----------
    values : array_like
        A float64 array is not copied: the result is a read-only view of it, so let nobody keep
        the array itself.

    Returns
    -------
    numpy.ndarray
        float64, ``writeable=False``.
    """
    array = np.asarray(values, dtype=np.float64).view()
    array.flags.writeable = False
    return array
