"""The gated delta rule token by token, in place on the state slots.

With decay ``g``, write strength ``beta`` and the state ``S`` ``[dv, dk]``, for every value head::

    S <- exp(g) S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

A key head serves ``Hv / Hk`` consecutive value heads. A tile of ``S`` is read once and written
once: with ``e = exp(g)`` and the old state, ``u = beta (v - e S k)`` and ``o = e S q + (k.q) u``.

Sources: ``torch_recurrent_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; Yang et
al., "Gated Delta Networks" (arXiv 2412.06464); the V-major layout of the states, and the columns
of a speculative row, are vllm-ascend's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["gated_delta_rule_decode", "gated_delta_rule_rows", "gating"]

# Rows of a state's tile. On a CPU it and what is made of it must fit the first-level cache.
_CPU_TILE = 16
_TILE = 64


@triton.jit
def _gating(A, B, Decay, Bias, G, Beta, s_a, s_b, n, heads, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, heads, BLOCK):
        h = start + tl.arange(0, BLOCK)
        inside = h < heads
        a = tl.load(A + row * s_a + h, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(B + row * s_b + h, mask=inside, other=0.0).to(tl.float32)
        x = a + tl.load(Bias + h, mask=inside, other=0.0)
        # log(1 + exp(x)) without overflow.
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        decay = tl.load(Decay + h, mask=inside, other=0.0)
        tl.store(G + row * heads + h, decay * softplus, mask=inside)
        tl.store(Beta + row * heads + h, 1.0 / (1.0 + tl.exp(-b)), mask=inside)


def gating(
    backend: Backend, a: Tensor, b: Tensor, negative_decay: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log decay ``g = -exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``.

    Parameters
    ----------
    backend : Backend
    a, b : Tensor
        ``[T, Hv]``, any float dtype.
    negative_decay, dt_bias : Tensor
        ``[Hv]`` float32; the first is ``-exp(A_log)``.

    Returns
    -------
    tuple of Tensor
        ``[T, Hv]`` float32 each.
    """
    tokens, heads = a.shape
    g = torch.empty((tokens, heads), dtype=torch.float32, device=a.device)
    beta = torch.empty_like(g)
    backend.launch(
        _gating,
        (tokens,),
        *(a, b, negative_decay, dt_bias, g, beta),
        *(a.stride(0), b.stride(0), tokens, heads),
        BLOCK=min(128, triton.next_power_of_2(heads)),
    )
    return g, beta


@triton.jit
def _decode(
    Q, K, V, G, Beta, S, Slots, O, s_q, s_k, s_v, s_slot, value_heads, share,
    DK: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(Slots + row).to(tl.int64)
    o = row * value_heads + head
    if slot > 0:
        d = tl.arange(0, DK)
        k = tl.load(K + row * s_k + (head // share) * DK + d).to(tl.float32)
        q = tl.load(Q + row * s_q + (head // share) * DK + d).to(tl.float32)
        decay = tl.exp(tl.load(G + o))
        beta = tl.load(Beta + o)
        overlap = tl.sum(k * q, 0)
        state = S + slot * s_slot + head * (DV * DK)
        for start in range(0, DV, TILE):
            e = start + tl.arange(0, TILE)
            place = state + e[:, None] * DK + d[None, :]
            s = tl.load(place)
            v = tl.load(V + row * s_v + head * DV + e).to(tl.float32)
            update = beta * (v - decay * tl.sum(s * k[None, :], 1))
            read = decay * tl.sum(s * q[None, :], 1) + update * overlap
            tl.store(place, s * decay + update[:, None] * k[None, :])
            tl.store(O + o * DV + e, read)
    else:
        for start in range(0, DV, TILE):
            e = start + tl.arange(0, TILE)
            tl.store(O + o * DV + e, tl.zeros([TILE], tl.float32))


def gated_delta_rule_decode(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """Take in one token of each row.

    Parameters
    ----------
    backend : Backend
    q, k : Tensor
        ``[R, Hk, dk]``, l2-normed, `q` scaled by ``dk ** -0.5``.
    v : Tensor
        ``[R, Hv, dv]``.
    g, beta : Tensor
        ``[R, Hv]`` float32, contiguous.
    states : Tensor
        ``[slots, Hv, dv, dk]`` float32, changed in place at `slots`.
    slots : Tensor
        ``[R]`` int32 or int64; those not positive are padding, the others differ.

    Returns
    -------
    Tensor
        ``[R, Hv, dv]`` float32; zero for padding.
    """
    rows, heads, dv = v.shape
    out = torch.empty((rows, heads, dv), dtype=torch.float32, device=v.device)
    backend.launch(
        _decode,
        (heads, rows),
        *(q, k, v, g, beta, states, slots, out),
        *(q.stride(0), k.stride(0), v.stride(0), states.stride(0), heads, heads // q.shape[1]),
        DK=q.shape[2],
        DV=dv,
        TILE=_tile(backend, dv),
    )
    return out


def _tile(backend: Backend, dv: int) -> int:
    return min(dv, _CPU_TILE if backend.name == "cpu" else _TILE)


@triton.jit
def _rows(
    Q, K, V, G, Beta, S, Slots, Accepted, Starts, O,
    s_q, s_k, s_v, s_slot, s_columns, value_heads, share,
    DK: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    e = tl.program_id(2) * TILE + tl.arange(0, TILE)
    first = tl.load(Starts + row)
    count = tl.load(Starts + row + 1) - first
    d = tl.arange(0, DK)
    begin = row * s_columns
    if COLUMNS > 1:
        begin += tl.load(Accepted + row) - 1
    initial = tl.load(Slots + begin).to(tl.int64)
    inside = head * (DV * DK) + e[:, None] * DK + d[None, :]
    if (count > 0) & (initial > 0):
        s = tl.load(S + initial * s_slot + inside)
        for t in range(count):
            token = first + t
            o = token * value_heads + head
            k = tl.load(K + token * s_k + (head // share) * DK + d).to(tl.float32)
            q = tl.load(Q + token * s_q + (head // share) * DK + d).to(tl.float32)
            v = tl.load(V + token * s_v + head * DV + e).to(tl.float32)
            s = s * tl.exp(tl.load(G + o))
            update = tl.load(Beta + o) * (v - tl.sum(s * k[None, :], 1))
            s = s + update[:, None] * k[None, :]
            tl.store(O + o * DV + e, tl.sum(s * q[None, :], 1))
            if COLUMNS > 1:
                column = tl.load(Slots + row * s_columns + t).to(tl.int64)
                if column > 0:
                    tl.store(S + column * s_slot + inside, s)
        if COLUMNS == 1:
            tl.store(S + initial * s_slot + inside, s)


def gated_delta_rule_rows(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    accepted: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Take in the few tokens of each row, one after the other.

    With one column of slots the state ends where it started. With more, a row is speculative: it
    starts from column ``accepted - 1``, and the state after token ``t`` goes to column ``t``, so
    that the next step can go on from whichever token was accepted last.

    Parameters
    ----------
    backend : Backend
    q, k, v, g, beta, states
        As for `gated_delta_rule_decode`, with T packed tokens in place of R rows.
    slots : Tensor
        ``[R, columns]`` int32 or int64. A row that starts from a slot that is not positive is
        padding; a column that is not positive is not written.
    accepted : Tensor
        ``[R]`` int32, at least 1; not read if there is one column.
    query_start_loc : Tensor
        ``[R + 1]`` int32. Rows have at most as many tokens as columns, if those are more than
        one; a row of none keeps its state.

    Returns
    -------
    Tensor
        ``[T, Hv, dv]`` float32; zero for padding.
    """
    tokens, heads, dv = v.shape
    rows, columns = slots.shape
    out = torch.zeros((tokens, heads, dv), dtype=torch.float32, device=v.device)
    tile = _tile(backend, dv)
    backend.launch(
        _rows,
        (heads, rows, dv // tile),
        *(q, k, v, g, beta, states, slots, accepted, query_start_loc, out),
        *(q.stride(0), k.stride(0), v.stride(0), states.stride(0), slots.stride(0)),
        *(heads, heads // q.shape[1]),
        DK=q.shape[2],
        DV=dv,
        TILE=tile,
        COLUMNS=columns,
    )
    return out
