"""The gated delta rule, one token at a time, in place on the state slots.

With decay ``g``, write strength ``β`` and the state ``S`` ``[dv, dk]``, for every value head::

    S ← exp(g) S;   u = β (v − S k);   S ← S + u kᵀ;   o = S q

A key head serves ``Hv / Hk`` consecutive value heads.

Sources: ``torch_recurrent_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; the V-major
layout of the states is vllm-ascend's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["gated_delta_rule_decode", "gating"]

# Elements of state updated at once: 2 MiB, so that a state stays in the cache from its gather to
# its scatter.
_MAX_STATE = 1 << 19


def gating(a: Tensor, b: Tensor, negative_decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay ``g = −exp(A_log) softplus(a + dt_bias)`` and ``β = sigmoid(b)``.

    Parameters
    ----------
    a, b : Tensor
        ``[T, Hv]``, any float dtype.
    negative_decay : Tensor
        ``[Hv]`` float32, ``−exp(A_log)``.
    dt_bias : Tensor
        ``[Hv]`` float32.

    Returns
    -------
    tuple of Tensor
        ``g`` (at most 0) and ``β``, both ``[T, Hv]`` float32.
    """
    return functional.softplus(a + dt_bias).mul_(negative_decay), b.float().sigmoid()


def gated_delta_rule_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """Take in one token of each row.

    Parameters
    ----------
    q, k : Tensor
        ``[R, Hk, dk]`` float32, l2-normed, `q` scaled by ``dk ** -0.5``.
    v : Tensor
        ``[R, Hv, dv]`` float32.
    g, beta : Tensor
        ``[R, Hv]`` float32.
    states : Tensor
        ``[slots, Hv, dv, dk]`` float32, changed in place at `slots`.
    slots : Tensor
        ``[R]`` int64, no two alike.

    Returns
    -------
    Tensor
        ``[R, Hv, dv]`` float32.
    """
    rows, heads, dv = v.shape
    dk = k.shape[-1]
    # Both reads of the state are one product: S' q = S q + u (k·q) for S' = S + u kᵀ.
    k_q = torch.stack((k, q), dim=2).repeat_interleave(heads // k.shape[1], dim=1)
    k_q = k_q.view(rows * heads, 2, dk)
    overlap = (k_q[:, 0] * k_q[:, 1]).sum(dim=-1, keepdim=True)
    decay = g.exp().view(rows * heads, 1, 1)
    beta = beta.reshape(rows * heads, 1)
    v = v.reshape(rows * heads, dv)
    out = torch.empty_like(v)

    chunk = min(rows, max(1, _MAX_STATE // (heads * dv * dk)))
    scratch = v.new_empty((chunk, heads, dv, dk))
    for start in range(0, rows, chunk):
        some = slots[start : start + chunk]
        part = slice(start * heads, (start + len(some)) * heads)
        gathered = scratch[: len(some)]
        torch.index_select(states, 0, some, out=gathered)
        state = gathered.view(-1, dv, dk).mul_(decay[part])
        read = torch.bmm(k_q[part], state.transpose(1, 2))
        update = torch.sub(v[part], read[:, 0]).mul_(beta[part])
        torch.addcmul(read[:, 1], update, overlap[part], out=out[part])
        state.baddbmm_(update.unsqueeze(2), k_q[part, :1])
        states.index_copy_(0, some, gathered)
    return out.view(rows, heads, dv)
