"""The gated delta rule, one token at a time, in place on the state slots.

With decay ``g``, write strength ``β`` and the state ``S`` ``[dv, dk]``, for every value head::

    S ← exp(g) S;   u = β (v − S k);   S ← S + u kᵀ;   o = S q

A key head serves ``Hv / Hk`` consecutive value heads.

The time goes into moving the states. Small ones are gathered, updated together and scattered. If
they are more than the cache holds, a run of evenly spaced slots, as a pool gives them out to
requests that come one after the other, is a strided view, and updated where it lies.

Sources: ``torch_recurrent_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; the V-major
layout of the states is vllm-ascend's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["StateRun", "gated_delta_rule_decode", "gating", "plan_runs"]

# Elements of state, 2 MiB, up to which a gather and a scatter stay in the cache.
_MAX_GATHER = 1 << 19


class StateRun(NamedTuple):
    """Consecutive rows whose slots are evenly spaced and ascend."""

    rows: slice
    slots: slice


def plan_runs(slots: Tensor, states: Tensor) -> tuple[StateRun, ...] | None:
    """Divide rows into runs.

    Parameters
    ----------
    slots : Tensor
        ``[R]`` int64.
    states : Tensor
        ``[slots, Hv, dv, dk]``, of any layer.

    Returns
    -------
    tuple of StateRun or None
        None if the states of all rows are gathered: few of them, or not on a CPU.
    """
    count = len(slots)
    small = count > 1 and count * states[0].numel() <= _MAX_GATHER
    if small or slots.device.type != "cpu":
        return None
    at = slots.tolist()
    runs = []
    start = 0
    while start < count:
        stop = start + 1
        step = max(1, at[stop] - at[start]) if stop < count else 1
        while stop < count and at[stop] - at[stop - 1] == step:
            stop += 1
        runs.append(StateRun(slice(start, stop), slice(at[start], at[stop - 1] + 1, step)))
        start = stop
    return tuple(runs)


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
    runs: tuple[StateRun, ...] | None = None,
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
    runs : tuple of StateRun or None
        What `plan_runs` makes of `slots`.

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
    if runs is None:
        state = states.index_select(0, slots)
        _update(state.flatten(0, 1), tokens.flat(), out.view(-1, dv))
        states.index_copy_(0, slots, state)
        return out
    for run in runs:
        state = states[run.slots]
        if len(state) < heads:
            for row, one in enumerate(state, run.rows.start):
                _update(one, tokens.part((row,)), out[row])
        else:
            for head in range(heads):
                part = (run.rows, head)
                _update(state[:, head], tokens.part(part), out[part])
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

    def part(self, index: tuple[int | slice, ...]) -> _Tokens:
        return _Tokens(*(x[index] for x in self))


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
