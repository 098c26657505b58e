"""Partial half-split rotary embedding with interleaved multimodal sections.

Source: ``Qwen3_5TextRotaryEmbedding`` and ``apply_rotary_pos_emb`` of transformers'
``models/qwen3_5/modeling_qwen3_5.py``; Su et al., "RoFormer", arXiv 2104.09864.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["apply_rotary", "rotary_angles"]


def rotary_angles(
    positions: npt.NDArray[np.int64],
    rotary_dim: int,
    rope_theta: float,
    mrope_section: tuple[int, ...] = (),
) -> Array:
    """Angle of every token and frequency.

    Frequency ``j`` is ``rope_theta ** (-2 j / rotary_dim)`` for ``j < rotary_dim / 2``, and the
    angle is position times frequency. With images a token has three positions: time T, height H
    and width W. Frequencies are dealt out to them in turn (interleaved, not in three runs):
    ``j`` uses H if ``j mod 3 == 1`` and ``j < 3 * mrope_section[1]``, W if ``j mod 3 == 2`` and
    ``j < 3 * mrope_section[2]``, else T. A text token has one position, T = H = W, and the
    sections have no effect.

    Parameters
    ----------
    positions : numpy.ndarray
        ``[tokens]`` for text, ``[3, tokens]`` for T, H and W.
    rotary_dim : int
        Dimensions of a head that rotate, even.
    rope_theta : float
        Base of the frequencies.
    mrope_section : tuple of int
        Frequencies for T, H and W; read only with three positions.

    Returns
    -------
    numpy.ndarray
        ``[tokens, rotary_dim / 2]``, radians.
    """
    frequencies = rope_theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if positions.ndim == 1:
        return frozen(positions[:, None] * frequencies)
    index = np.arange(rotary_dim // 2)
    source = np.zeros_like(index)
    for axis in (1, 2):
        source[(index % 3 == axis) & (index < 3 * mrope_section[axis])] = axis
    return frozen(positions[source].T * frequencies)


def apply_rotary(x: Array, angles: Array) -> Array:
    """Rotate the leading dimensions of every head; the rest passes through.

    Dimension ``j`` pairs with ``j + rotary_dim / 2`` (half-split, as in GPT-NeoX), not with its
    neighbour.

    Parameters
    ----------
    x : numpy.ndarray
        ``[tokens, heads, head_dim]``.
    angles : numpy.ndarray
        ``[tokens, rotary_dim / 2]``, radians.

    Returns
    -------
    numpy.ndarray
        ``[tokens, heads, head_dim]``.
    """
    half = angles.shape[-1]
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return frozen(
        np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    )
