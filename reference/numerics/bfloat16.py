"""Rounding to bfloat16, which NumPy does not have.

Source: bfloat16 is the upper half of an IEEE 754 binary32; rounding is to nearest, ties to even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["round_bfloat16"]


def round_bfloat16(values: npt.ArrayLike) -> Array:
    """Round to bfloat16.

    Values are rounded to float32 first, as devices do that compute in float32; a product of two
    bfloat16 numbers is exact there, so it is rounded once.

    Parameters
    ----------
    values : array_like
        Finite.

    Returns
    -------
    numpy.ndarray
        float64 with values of bfloat16.
    """
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    odd = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = (bits + np.uint64(0x7FFF) + odd) & np.uint64(0xFFFF0000)
    return frozen(rounded.astype(np.uint32).view(np.float32))
