"""Partial rotary embedding from a precomputed table.

With text the three position axes of Qwen3.5's interleaved multimodal rotary are equal, so every
frequency sees the same position and the plain form results.

Source: ``Qwen3_5TextRotaryEmbedding`` and ``apply_rotary_pos_emb`` of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rotary", "cos_sin_table"]


def cos_sin_table(
    num_positions: int, rotary_dim: int, theta: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Return cosines and sines of every position and frequency.

    Frequency ``j`` turns by ``theta ** (-2j / rotary_dim)`` radians a position. Frequencies and
    angles are float32, as in the source: a float64 angle would differ at far positions.

    Parameters
    ----------
    num_positions : int
    rotary_dim : int
        Even.
    theta : float
    device : torch.device or str

    Returns
    -------
    Tensor
        ``[num_positions, rotary_dim]`` float32: ``rotary_dim / 2`` cosines, then as many sines.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequency = 1.0 / (theta**exponent)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


def apply_rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of every head, in place.

    Dimension ``i`` of the first half of the rotary part pairs with dimension ``i`` of the second.

    Parameters
    ----------
    x : Tensor
        ``[T, heads, D]``; its first ``rotary_dim`` dimensions are overwritten.
    cos_sin : Tensor
        ``[T, rotary_dim]``: rows of the table at the tokens' positions.

    Returns
    -------
    Tensor
        `x`.
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
    return x
