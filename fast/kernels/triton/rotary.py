"""Head norm and partial rotary embedding in one pass.

Dimension ``i`` of the first half of the rotary part pairs with dimension ``i`` of the second; the
rest of a head is only normed.

Sources: ``Qwen3_5RMSNorm`` and ``apply_rotary_pos_emb`` of transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["norm_rotary"]


@triton.jit
def _norm_rotary(
    X, Weight, CosSin, Out, s_x, s_cos, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1)
    heads = tl.num_programs(0)
    x = X + token * s_x + head * N
    w = Weight + head * N
    out = Out + (token * heads + head) * N
    d = tl.arange(0, BLOCK)
    whole = tl.load(x + d, mask=d < N, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / N + eps)
    normed = whole * factor * tl.load(w + d, mask=d < N, other=0.0)
    tl.store(out + d, normed.to(Out.dtype.element_ty), mask=(d >= 2 * HALF) & (d < N))
    i = tl.arange(0, HALF_BLOCK)
    inside = i < HALF
    first = tl.load(x + i, mask=inside, other=0.0).to(tl.float32) * factor
    first = first * tl.load(w + i, mask=inside, other=0.0)
    second = tl.load(x + HALF + i, mask=inside, other=0.0).to(tl.float32) * factor
    second = second * tl.load(w + HALF + i, mask=inside, other=0.0)
    cos = tl.load(CosSin + token * s_cos + i, mask=inside, other=0.0)
    sin = tl.load(CosSin + token * s_cos + HALF + i, mask=inside, other=0.0)
    tl.store(out + i, (first * cos - second * sin).to(Out.dtype.element_ty), mask=inside)
    tl.store(out + HALF + i, (second * cos + first * sin).to(Out.dtype.element_ty), mask=inside)


def norm_rotary(
    backend: Backend, x: Tensor, weight: Tensor, cos_sin: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Norm every head, then rotate its leading dimensions.

    Parameters
    ----------
    backend : Backend
    x : Tensor
        ``[T, heads, D]``, its trailing axes contiguous.
    weight : Tensor
        ``[heads, D]`` float32, the one already added.
    cos_sin : Tensor
        ``[T, rotary_dim]`` float32: cosines, then sines, of the tokens' positions.
    eps : float
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        ``[T, heads, D]``, contiguous.
    """
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=dtype, device=x.device)
    half = cos_sin.shape[1] // 2
    backend.launch(
        _norm_rotary,
        (heads, tokens),
        *(x, weight, cos_sin, out, x.stride(0), cos_sin.stride(0), eps),
        N=dim,
        BLOCK=triton.next_power_of_2(dim),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
    )
    return out
