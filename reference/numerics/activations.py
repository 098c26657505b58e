"""Pointwise functions, written so that no argument overflows.

Source: ``torch.nn.functional`` of the same names.
"""

from __future__ import annotations

import numpy as np

from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["sigmoid", "silu", "softplus"]


def sigmoid(x: Array) -> Array:
    """Logistic function ``1 / (1 + exp(-x))``.

    Computed from ``exp(-|x|)``, which lies in (0, 1] whatever `x` is.

    Parameters
    ----------
    x : numpy.ndarray
        Any shape.

    Returns
    -------
    numpy.ndarray
        Same shape, values in [0, 1].
    """
    small = np.exp(-np.abs(x))
    return frozen(np.where(x >= 0, 1.0, small) / (1.0 + small))


def silu(x: Array) -> Array:
    """``x * sigmoid(x)``, also called swish.

    Parameters
    ----------
    x : numpy.ndarray
        Any shape.

    Returns
    -------
    numpy.ndarray
        Same shape.
    """
    return frozen(x * sigmoid(x))


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))``.

    torch and the Ascend operator return `x` itself above 20; the difference, at most ``exp(-20)``
    = 2.1e-9, is far below what float32 resolves there (1.9e-6), so the reference keeps the plain
    definition.

    Parameters
    ----------
    x : numpy.ndarray
        Any shape.

    Returns
    -------
    numpy.ndarray
        Same shape, values at least 0.
    """
    return frozen(np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))))
