"""The gated delta rule over many tokens: chunks of 64, solved as small linear systems.

Within a chunk, with ``G_i`` the running sum of ``g`` and ``D_ij = exp(G_i - G_j)`` for ``j <= i``::

    (I + L) U = beta V           L_ij = beta_i (k_i.k_j) D_ij,  j < i
    (I + L) W = beta exp(G) K
    V' = U - W S^T               what each token adds, given the state S [dv, dk] before the chunk
    O  = exp(G) Q S^T + ((Q K^T) o D) V'
    S <- exp(G_last) S + V'^T (exp(G_last - G) K)

One kernel prepares G, U, W and ``(Q K^T) o D`` of all chunks side by side; the other passes the
states through the chunks of a row, a tile of ``dv`` a program. A chunk's missing tokens count as
``g = beta = 0``, which adds nothing.

Source: ``torch_chunk_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; Yang et al.,
"Gated Delta Networks" (arXiv 2412.06464).
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["chunk_gated_delta_rule", "chunk_table"]

_CHUNK = 64
_TILE = 32


@triton.jit
def _prepare(
    Q, K, V, G, Beta, Chunks, U, W, Scores, Sums, s_q, s_k, s_v, value_heads, share,
    CHUNK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    first = tl.load(Chunks + chunk * 2)
    count = tl.load(Chunks + chunk * 2 + 1)
    i = tl.arange(0, CHUNK)
    inside = i < count
    d = tl.arange(0, DK)
    e = tl.arange(0, DV)
    token = first + i
    index = token * value_heads + head
    g = tl.load(G + index, mask=inside, other=0.0)
    beta = tl.load(Beta + index, mask=inside, other=0.0)
    sums = tl.cumsum(g, 0)
    tl.store(Sums + index, sums, mask=inside)
    key_place = token[:, None] * s_k + (head // share) * DK + d[None, :]
    k = tl.load(K + key_place, mask=inside[:, None], other=0.0).to(tl.float32)
    causal = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(causal, sums[:, None] - sums[None, :], -1e30))
    k_transposed = tl.trans(k)
    solved = tl.dot(k, k_transposed, input_precision="ieee") * decay * beta[:, None]
    # Row by row, -L becomes (I + L)^-1 - I: row i needs the rows above it alone.
    solved = tl.where(i[:, None] > i[None, :], -solved, 0.0)
    for r in range(1, CHUNK):
        row = tl.sum(tl.where(i[:, None] == r, solved, 0.0), 0)
        row = row + tl.sum(row[:, None] * solved, 0)
        solved = tl.where(i[:, None] == r, row[None, :], solved)
    solved = solved + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    grown = k * (beta * tl.exp(sums))[:, None]
    w = tl.dot(solved, grown, input_precision="ieee")
    tl.store(W + index[:, None] * DK + d[None, :], w, mask=inside[:, None])
    value_place = token[:, None] * s_v + head * DV + e[None, :]
    v = tl.load(V + value_place, mask=inside[:, None], other=0.0).to(tl.float32)
    u = tl.dot(solved, v * beta[:, None], input_precision="ieee")
    tl.store(U + index[:, None] * DV + e[None, :], u, mask=inside[:, None])
    query_place = token[:, None] * s_q + (head // share) * DK + d[None, :]
    q = tl.load(Q + query_place, mask=inside[:, None], other=0.0).to(tl.float32)
    scores = tl.dot(q, k_transposed, input_precision="ieee") * decay
    tl.store(Scores + index[:, None] * CHUNK + i[None, :], scores, mask=inside[:, None])


@triton.jit
def _pass(
    Q, K, U, W, Scores, Sums, S, Slots, Starts, O, s_q, s_k, s_slot, value_heads, share,
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
            index = token * value_heads + head
            sums = tl.load(Sums + index, mask=inside, other=0.0)
            end = tl.load(Sums + (tl.minimum(start + CHUNK, last) - 1) * value_heads + head)
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
            tl.store(O + index[:, None] * DV + e[None, :], read, mask=inside[:, None])
            place = token[:, None] * s_k + (head // share) * DK + d[None, :]
            k = tl.load(K + place, mask=inside[:, None], other=0.0).to(tl.float32)
            k = k * tl.exp(end - sums)[:, None]
            s = tl.dot(tl.trans(added), k, s * tl.exp(end), input_precision="ieee")
        tl.store(state, s)


def chunk_table(query_start_loc: Tensor) -> Tensor:
    """Return first token and number of tokens of every chunk, ``[chunks, 2]`` int32.

    Parameters
    ----------
    query_start_loc : Tensor
        ``[R + 1]``.
    """
    starts = query_start_loc.tolist()
    chunks = [
        (first, min(_CHUNK, stop - first))
        for start, stop in itertools.pairwise(starts)
        for first in range(start, stop, _CHUNK)
    ]
    table = torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2)
    return table.to(query_start_loc.device)


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
        What `chunk_table` makes of it; the same for every layer of a step.

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
    u, w = empty(tokens, heads, dv), empty(tokens, heads, dk)
    scores, sums = empty(tokens, heads, _CHUNK), empty(tokens, heads)
    backend.launch(
        _prepare,
        (heads, len(chunks)),
        *(q, k, v, g, beta, chunks, u, w, scores, sums),
        *(q.stride(0), k.stride(0), v.stride(0), heads, share),
        CHUNK=_CHUNK,
        DK=dk,
        DV=dv,
    )
    tile = min(dv, _TILE)
    backend.launch(
        _pass,
        (heads, dv // tile, len(slots)),
        *(q, k, u, w, scores, sums, states, slots, query_start_loc, out),
        *(q.stride(0), k.stride(0), states.stride(0), heads, share),
        CHUNK=_CHUNK,
        DK=dk,
        DV=dv,
        TILE=tile,
    )
    return out
