"""The three normalisations of Qwen3.5; all work on the last axis.

Source: ``Qwen3_5RMSNorm``, ``Qwen3_5RMSNormGated`` and ``l2norm`` of transformers'
``models/qwen3_5/modeling_qwen3_5.py``.
"""

from __future__ import annotations

import numpy as np

from servespec.reference.numerics.activations import silu
from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]


def _unit_rms(x: Array, eps: float) -> Array:
    return frozen(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale to unit root mean square, then by ``1 + weight``.

    The weight is stored as a difference from one (zero-centred, as in Gemma), unlike that of
    `gated_rms_norm`; a checkpoint read with the wrong rule still looks plausible.

    Parameters
    ----------
    x : numpy.ndarray
        ``[..., size]``.
    weight : numpy.ndarray
        ``[size]``.
    eps : float
        Added to the mean square.

    Returns
    -------
    numpy.ndarray
        ``[..., size]``.
    """
    return frozen(_unit_rms(x, eps) * (1.0 + weight))


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """Scale to unit root mean square, then by `weight`, then by ``silu(gate)``.

    The norm comes before the gate: the gate does not enter the mean square. The weight is plain.

    Parameters
    ----------
    x, gate : numpy.ndarray
        ``[..., size]``.
    weight : numpy.ndarray
        ``[size]``.
    eps : float
        Added to the mean square.

    Returns
    -------
    numpy.ndarray
        ``[..., size]``.
    """
    return frozen(_unit_rms(x, eps) * weight * silu(gate))


def l2_norm(x: Array, eps: float = 1e-6) -> Array:
    """Scale to unit length.

    `eps` is added to the sum of squares (not to its mean), so a zero vector stays zero and the
    result is never longer than one.

    Parameters
    ----------
    x : numpy.ndarray
        ``[..., size]``.
    eps : float
        Added to the sum of squares.

    Returns
    -------
    numpy.ndarray
        ``[..., size]``.
    """
    return frozen(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps))
