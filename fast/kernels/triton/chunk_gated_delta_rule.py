"""The gated delta rule over many tokens: chunks of 64, solved as small linear systems.

Within a chunk, with ``G_i`` the running sum of ``g`` and ``D_ij = exp(G_i - G_j)`` for ``j <= i``::

    (I + L) U = beta V           L_ij = beta_i (k_i.k_j) D_ij,  j < i
    (I + L) W = beta exp(G) K
    V' = U - W S^T               what each token adds, given the state S [dv, dk] before the chunk
    O  = exp(G) Q S^T + ((Q K^T) o D) V'
    S <- exp(G_last) S + V'^T (exp(G_last - G) K)

One kernel inverts ``I + L`` for all chunks side by side, one applies the inverse, and the last
passes the states through the chunks of a row, a tile of ``dv`` a program: three, because the tiles
of the first two together are more than a core's memory. A chunk's missing tokens count as
``g = beta = 0``, which adds nothing.

Source: ``torch_chunk_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; Yang et al.,
"Gated Delta Networks" (arXiv 2412.06464).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend
from servespec.fast.kernels.chunk_gated_delta_rule import CHUNK_SIZE

__all__ = ["chunk_gated_delta_rule"]

_TILE = 32


@triton.jit
def _decay(sums):
    """Return ``exp(G_i - G_j)``, and 1 where that would be more: above the diagonal."""
    return tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))


@triton.jit
def _solve(
    K, G, Beta, Chunks, Solved, Sums, s_k, tokens, share,
    CHUNK: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    first = tl.load(Chunks + chunk * 2)
    i = tl.arange(0, CHUNK)
    inside = i < tl.load(Chunks + chunk * 2 + 1)
    d = tl.arange(0, DK)
    token = first + i
    index = head * tokens + token
    sums = tl.cumsum(tl.load(G + index, mask=inside, other=0.0), 0)
    tl.store(Sums + index, sums, mask=inside)
    beta = tl.load(Beta + index, mask=inside, other=0.0)
    place = token[:, None] * s_k + (head // share) * DK + d[None, :]
    k = tl.load(K + place, mask=inside[:, None], other=0.0).to(tl.float32)
    solved = tl.dot(k * beta[:, None], tl.trans(k), input_precision="ieee") * _decay(sums)
    # Row by row, -L becomes (I + L)^-1 - I: row i needs the rows above it alone.
    solved = tl.where(i[:, None] > i[None, :], -solved, 0.0)
    for r in range(1, CHUNK):
        this = (i == r)[:, None]
        row = tl.sum(tl.where(this, solved, 0.0), 0)
        row = row + tl.sum(row[:, None] * solved, 0)
        solved = tl.where(this, row[None, :], solved)
    solved = solved + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    tl.store(Solved + index[:, None] * CHUNK + i[None, :], solved, mask=inside[:, None])


@triton.jit
def _apply(
    Q, K, V, Beta, Chunks, Solved, Sums, U, W, Scores, s_q, s_k, s_v, tokens, share,
    CHUNK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    first = tl.load(Chunks + chunk * 2)
    i = tl.arange(0, CHUNK)
    inside = i < tl.load(Chunks + chunk * 2 + 1)
    token = first + i
    index = head * tokens + token
    sums = tl.load(Sums + index, mask=inside, other=0.0)
    beta = tl.load(Beta + index, mask=inside, other=0.0)
    square = index[:, None] * CHUNK + i[None, :]
    solved = tl.load(Solved + square, mask=inside[:, None], other=0.0)
    for start in range(0, DV, TILE):
        e = start + tl.arange(0, TILE)
        place = token[:, None] * s_v + head * DV + e[None, :]
        v = tl.load(V + place, mask=inside[:, None], other=0.0).to(tl.float32)
        u = tl.dot(solved, v * beta[:, None], input_precision="ieee")
        tl.store(U + index[:, None] * DV + e[None, :], u, mask=inside[:, None])
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, DK, TILE):
        d = start + tl.arange(0, TILE)
        place = token[:, None] * s_k + (head // share) * DK + d[None, :]
        k = tl.load(K + place, mask=inside[:, None], other=0.0).to(tl.float32)
        w = tl.dot(solved, k * (beta * tl.exp(sums))[:, None], input_precision="ieee")
        tl.store(W + index[:, None] * DK + d[None, :], w, mask=inside[:, None])
        place = token[:, None] * s_q + (head // share) * DK + d[None, :]
        q = tl.load(Q + place, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    scores = tl.where(i[:, None] >= i[None, :], scores * _decay(sums), 0.0)
    tl.store(Scores + square, scores, mask=inside[:, None])


@triton.jit
def _pass(
    Q, K, U, W, Scores, Sums, S, Slots, Starts, O, s_q, s_k, s_slot, tokens, value_heads, share,
    CHUNK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    e = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.program_id(2)
    slot = tl.load(Slots + row).to(tl.int64)
    first = tl.load(Starts + row)
    last = tl.load(Starts + row + 1)
    if (slot > 0) & (last > first):
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)
        state = S + slot * s_slot + head * (DV * DK) + e[:, None] * DK + d[None, :]
        s = tl.load(state)
        for start in range(first, last, CHUNK):
            token = start + i
            inside = token < last
            index = head * tokens + token
            sums = tl.load(Sums + index, mask=inside, other=0.0)
            end = tl.load(Sums + head * tokens + tl.minimum(start + CHUNK, last) - 1)
            w = tl.load(W + index[:, None] * DK + d[None, :], mask=inside[:, None], other=0.0)
            u = tl.load(U + index[:, None] * DV + e[None, :], mask=inside[:, None], other=0.0)
            added = u - tl.dot(w, tl.trans(s), input_precision="ieee")
            place = token[:, None] * s_q + (head // share) * DK + d[None, :]
            q = tl.load(Q + place, mask=inside[:, None], other=0.0).to(tl.float32)
            read = tl.dot(q, tl.trans(s), input_precision="ieee") * tl.exp(sums)[:, None]
            scores = tl.load(
                Scores + index[:, None] * CHUNK + i[None, :], mask=inside[:, None], other=0.0
            )
            read = tl.dot(scores, added, read, input_precision="ieee")
            place = (token * value_heads + head)[:, None] * DV + e[None, :]
            tl.store(O + place, read, mask=inside[:, None])
            place = token[:, None] * s_k + (head // share) * DK + d[None, :]
            k = tl.load(K + place, mask=inside[:, None], other=0.0).to(tl.float32)
            k = k * tl.exp(end - sums)[:, None]
            s = tl.dot(tl.trans(added), k, s * tl.exp(end), input_precision="ieee")
        tl.store(state, s)


def chunk_gated_delta_rule(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    chunks: Tensor,
) -> Tensor:
    """Take in all tokens of every row.

    Parameters
    ----------
    backend : Backend
    q, k : Tensor
        ``[T, Hk, dk]``, packed, l2-normed, `q` scaled by ``dk ** -0.5``.
    v : Tensor
        ``[T, Hv, dv]``.
    g, beta : Tensor
        ``[T, Hv]`` float32, contiguous.
    states : Tensor
        ``[slots, Hv, dv, dk]`` float32, changed in place at `slots`.
    slots : Tensor
        ``[R]`` int32 or int64; those not positive are padding, the others differ.
    query_start_loc : Tensor
        ``[R + 1]`` int32; a row of no tokens keeps its state.
    chunks : Tensor
        ``[chunks, 2]`` int32 first token and number of tokens of every chunk, as `chunk_table` of
        `servespec.fast.kernels.chunk_gated_delta_rule` gives them.

    Returns
    -------
    Tensor
        ``[T, Hv, dv]`` float32; zero for padding.
    """
    tokens, heads, dv = v.shape
    dk = q.shape[2]
    share = heads // q.shape[1]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=v.device)

    out = torch.zeros((tokens, heads, dv), dtype=torch.float32, device=v.device)
    if not len(chunks):
        return out
    # What belongs to a head lies together: vectors of a stride cost the Ascend compiler eight times
    # their size in padding.
    g, beta = g.t().contiguous(), beta.t().contiguous()
    u, w = empty(heads, tokens, dv), empty(heads, tokens, dk)
    solved, scores = (empty(heads, tokens, CHUNK_SIZE) for _ in range(2))
    sums = empty(heads, tokens)
    backend.launch(
        _solve,
        (heads, len(chunks)),
        *(k, g, beta, chunks, solved, sums, k.stride(0), tokens, share),
        CHUNK=CHUNK_SIZE,
        DK=dk,
    )
    backend.launch(
        _apply,
        (heads, len(chunks)),
        *(q, k, v, beta, chunks, solved, sums, u, w, scores),
        *(q.stride(0), k.stride(0), v.stride(0), tokens, share),
        CHUNK=CHUNK_SIZE,
        DK=dk,
        DV=dv,
        TILE=min(dk, dv, CHUNK_SIZE),
    )
    tile = min(dv, _TILE)
    backend.launch(
        _pass,
        (heads, dv // tile, len(slots)),
        *(q, k, u, w, scores, sums, states, slots, query_start_loc, out),
        *(q.stride(0), k.stride(0), states.stride(0), tokens, heads, share),
        CHUNK=CHUNK_SIZE,
        DK=dk,
        DV=dv,
        TILE=tile,
    )
    return out
