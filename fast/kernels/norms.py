"""Root-mean-square norms, all computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]

_L2_EPS = 1e-6


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    # A norm is one pass without a temporary, and accumulates in float32 for narrow dtypes too.
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x * rsqrt(mean(x²) + eps) * weight`` over the last axis.

    Parameters
    ----------
    x : Tensor
        ``[..., n]``.
    weight : Tensor
        Broadcasts with `x`; float32. Qwen3.5 stores ``weight - 1``: the caller adds the one.
    eps : float

    Returns
    -------
    Tensor
        As `x`, float32.

    Notes
    -----
    Source: ``Qwen3_5RMSNorm`` of transformers.
    """
    return (x * _inverse_rms(x, eps)).mul_(weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x * rsqrt(mean(x²) + eps) * weight * silu(gate)`` over the last axis.

    The norm comes before the gate, and the weight is plain (not ``1 + weight``).

    Parameters
    ----------
    x : Tensor
        ``[..., n]`` float32.
    gate : Tensor
        As `x`, any float dtype.
    weight : Tensor
        ``[n]`` float32.
    eps : float

    Returns
    -------
    Tensor
        As `x`.

    Notes
    -----
    Source: ``Qwen3_5RMSNormGated`` of transformers.
    """
    return (x * _inverse_rms(x, eps)).mul_(weight).mul_(functional.silu(gate.float()))


def l2_norm(x: Tensor) -> Tensor:
    """Return ``x * rsqrt(sum(x²) + 1e-6)`` over the last axis, float32.

    Notes
    -----
    Source: ``l2norm`` of transformers' ``modeling_qwen3_5.py``.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * norm.square_().add_(_L2_EPS).rsqrt_()
