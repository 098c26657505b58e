"""The gated delta rule, one token at a time, in place on the state slots.

With decay ``g``, write strength ``β`` and the state ``S`` ``[dv, dk]``, for every value head::

    S ← exp(g) S;   u = β (v − S k);   S ← S + u kᵀ;   o = S q

A key head serves ``Hv / Hk`` consecutive value heads.

The time goes into moving the states. Few of them are gathered, updated together and scattered. More
than the cache holds are done a head at a time; where the slots are evenly spaced, as a pool gives
them out to requests that come one after the other, they are updated where they lie.

Sources: ``torch_recurrent_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; the V-major
layout of the states is vllm-ascend's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["evenly_spaced", "gated_delta_rule_decode", "gating"]

# Elements of state, 2 MiB, that stay in the cache from one operation to the next.
_MAX_TOGETHER = 1 << 19


def evenly_spaced(slots: Tensor) -> slice | None:
    """Return slots as a slice if they ascend in even steps; None if not, or not on a CPU.

    Parameters
    ----------
    slots : Tensor
        ``[R]`` int64.
    """
    if not len(slots) or slots.device.type != "cpu":
        return None
    at = slots.numpy()
    step = int(at[1] - at[0]) if len(at) > 1 else 1
    if step < 1 or (np.diff(at) != step).any():
        return None
    return slice(int(at[0]), int(at[-1]) + 1, step)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    span: slice | None = None,
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
    span : slice or None
        What `evenly_spaced` makes of `slots`.

    Returns
    -------
    Tensor
        ``[R, Hv, dv]`` float32.
    """
    rows, heads, dv = v.shape
    # Both reads of the state are one product: S' q = S q + u (k·q) for S' = S + u kᵀ.
    k_q = torch.stack((k, q), dim=2).repeat_interleave(heads // k.shape[1], dim=1)
    tokens = _Tokens(k_q, (k_q[:, :, 0] * k_q[:, :, 1]).sum(dim=-1, keepdim=True), v, g.exp(), beta)
    out = v.new_empty((rows, heads, dv))
    view = None if span is None else states[span]
    together = rows * states[0].numel() <= _MAX_TOGETHER or states.device.type != "cpu"
    if together or (rows == 1 and view is not None):
        part = view if view is not None and view.is_contiguous() else states.index_select(0, slots)
        _update(part.flatten(0, 1), tokens.flat(), out.view(-1, dv))
        if part is not view:
            states.index_copy_(0, slots, part)
        return out
    for head in range(heads):
        own = states[:, head]
        part = own.index_select(0, slots) if view is None else view[:, head]
        _update(part, tokens.of(head), out[:, head])
        if view is None:
            own.index_copy_(0, slots, part)
    return out


class _Tokens(NamedTuple):
    """A token of every row and value head: k and q ``[.., 2, dk]``, k·q ``[.., 1]``, v, e^g, β."""

    k_q: Tensor
    overlap: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def flat(self) -> _Tokens:
        return _Tokens(*(x.flatten(0, 1) for x in self))

    def of(self, head: int) -> _Tokens:
        return _Tokens(*(x[:, head] for x in self))


def _update(state: Tensor, tokens: _Tokens, out: Tensor) -> None:
    """Update states ``[n, dv, dk]`` in place and write what they answer to `out` ``[n, dv]``."""
    k_q, overlap, v, decay, beta = tokens
    state.mul_(decay[:, None, None])
    read = torch.bmm(k_q, state.mT)
    update = torch.sub(v, read[:, 0]).mul_(beta[:, None])
    torch.addcmul(read[:, 1], update, overlap, out=out)
    if state.is_contiguous():
        state.baddbmm_(update[:, :, None], k_q[:, :1])
    else:
        state.addcmul_(update[:, :, None], k_q[:, :1])
