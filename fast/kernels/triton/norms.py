"""Root-mean-square norms, computed in float32, a row a program.

Sources: ``Qwen3_5RMSNorm``, ``Qwen3_5RMSNormGated`` and ``l2norm`` of transformers'
``modeling_qwen3_5.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]

_L2_EPS = 1e-6


@triton.jit
def _norm(
    X, Gate, Weight, Out, s_x, s_gate, weight_rows, eps, scale,
    N: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr, GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    inner = tl.program_id(0)
    outer = tl.program_id(1)
    rows = tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    inside = d < N
    x = tl.load(X + outer * s_x + inner * N + d, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(x * x, 0)
    if MEAN:
        total = total / N
    y = x * (scale / tl.sqrt(total + eps))
    if WEIGHTED:
        y = y * tl.load(Weight + (inner % weight_rows) * N + d, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(Gate + outer * s_gate + inner * N + d, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(Out + (outer * rows + inner) * N + d, y.to(Out.dtype.element_ty), mask=inside)


def rms_norm(
    backend: Backend, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis.

    Parameters
    ----------
    backend : Backend
    x : Tensor
        ``[T, n]`` or ``[T, heads, n]``, its trailing axes contiguous.
    weight : Tensor
        ``[n]`` or ``[heads, n]`` float32. Qwen3.5 stores ``weight - 1``: the caller adds the one.
    eps : float
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        As `x`, contiguous.
    """
    return _launch(backend, x, None, weight, eps, 1.0, dtype, mean=True)


def gated_rms_norm(
    backend: Backend,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``x * rsqrt(mean(x^2) + eps) * weight * silu(gate)`` over the last axis.

    Parameters
    ----------
    backend : Backend
    x, gate : Tensor
        ``[T, heads, n]``, their trailing axes contiguous.
    weight : Tensor
        ``[n]`` float32, plain (not ``1 + weight``).
    eps : float
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        As `x`, contiguous.
    """
    return _launch(backend, x, gate, weight, eps, 1.0, dtype, mean=True)


def l2_norm(backend: Backend, x: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``x * scale * rsqrt(sum(x^2) + 1e-6)`` over the last axis, float32.

    Parameters
    ----------
    backend : Backend
    x : Tensor
        ``[T, heads, n]``, its trailing axes contiguous.
    scale : float
        ``n ** -0.5`` for queries.

    Returns
    -------
    Tensor
        As `x`, contiguous.
    """
    return _launch(backend, x, None, None, _L2_EPS, scale, torch.float32, mean=False)


def _launch(
    backend: Backend,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: float,
    dtype: torch.dtype,
    *,
    mean: bool,
) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    size = x.shape[-1]
    heads = x[0].numel() // size
    other = x if gate is None else gate
    weights = out if weight is None else weight
    backend.launch(
        _norm,
        (heads, x.shape[0]),
        *(x, other, weights, out, x.stride(0), other.stride(0)),
        *(1 if weight is None else weight.numel() // size, eps, scale),
        N=size,
        BLOCK=triton.next_power_of_2(size),
        MEAN=mean,
        GATED=gate is not None,
        WEIGHTED=weight is not None,
    )
    return out
