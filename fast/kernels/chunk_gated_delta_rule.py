"""The gated delta rule over many tokens: chunks of at most 64, solved as small linear systems.

Within a chunk, with ``G_i`` the running sum of ``g`` and ``D_ij = exp(G_i − G_j)`` for ``j <= i``:

    (I + L) U = β V           L_ij = β_i (k_i·k_j) D_ij,  j < i
    (I + L) W = β exp(G) K
    V' = U − W Sᵀ             what each token adds, given the state S [dv, dk] before the chunk
    O  = exp(G) Q Sᵀ + ((Q Kᵀ) ∘ D) V'
    S ← exp(G_last) S + V'ᵀ (exp(G_last − G) K)

All but the lines with ``S`` is done for many chunks at once; then the chunks of a row follow one
another while all rows advance side by side. A row of fewer than 64 tokens takes a smaller chunk, a
power of two that depends on its own length alone. Padding is exact: ``g = β = 0`` adds nothing.

A decay below ``exp(-60)`` counts as zero. What it multiplies is then 19 orders of magnitude below
the rounding of float32, and products with it would be subnormal numbers, on which processors are a
hundred times slower.

Source: ``torch_chunk_gated_delta_rule`` of transformers' ``modeling_qwen3_5.py``; the derivation is
Yang et al., "Gated Delta Networks" (arXiv 2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["CHUNK_SIZE", "ChunkPlan", "chunk_gated_delta_rule", "chunk_table", "plan_chunks"]

CHUNK_SIZE = 64
"""Tokens of a whole chunk."""

_MIN_CHUNK = 4
_MIN_LOG_DECAY = -60.0
# Elements of keys and values prepared at once, 1 MiB: more than a few times that is out of cache.
_MAX_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Consecutive chunks of some rows.

    `tokens` ``[n, size]``: packed token of each place, padding names the row's last token;
    `padding` ``[n, size]``: bool; `kept` and `targets`: the places that hold a token, flat, and
    the tokens they hold; `active`: for each scan step the rows that have a chunk, which are the
    first ones of the batch; their chunks lie side by side in that order.
    """

    tokens: Tensor
    padding: Tensor
    kept: Tensor
    targets: Tensor
    active: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Some rows of one chunk size, longest first."""

    rows: Tensor
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How rows are cut into chunks; the same for every layer."""

    batches: tuple[_Batch, ...]


def plan_chunks(
    query_start_loc: Tensor, elements_per_token: int, longer_than: int = 0
) -> ChunkPlan:
    """Cut packed rows into chunks.

    Parameters
    ----------
    query_start_loc : Tensor
        ``[R + 1]``, cumulative token counts, 0 first.
    elements_per_token : int
        ``Hv * (dk + dv)``, which decides how many tokens are prepared at once.
    longer_than : int
        Rows of at most so many tokens are left out.

    Returns
    -------
    ChunkPlan
    """
    device = query_start_loc.device
    starts = query_start_loc.cpu().numpy().astype(np.int64)
    lengths = np.diff(starts)
    chosen = np.flatnonzero(lengths > longer_than)
    exponents = np.ceil(np.log2(lengths[chosen])).astype(np.int64)
    sizes = np.clip(1 << exponents, _MIN_CHUNK, CHUNK_SIZE)
    batches = []
    for size in np.unique(sizes).tolist():
        most = max(1, _MAX_ELEMENTS // (size * elements_per_token))
        alike = chosen[sizes == size]
        alike = alike[np.argsort(-lengths[alike], kind="stable")]
        for first in range(0, len(alike), most):
            rows = alike[first : first + most]
            batches.append(
                _Batch(
                    rows=torch.from_numpy(rows).to(device),
                    segments=_segments(starts[rows], lengths[rows], size, most, device),
                )
            )
    return ChunkPlan(tuple(batches))


def chunk_table(query_start_loc: Tensor) -> Tensor:
    """Return first token and number of tokens of every chunk, ``[chunks, 2]`` int32.

    Parameters
    ----------
    query_start_loc : Tensor
        ``[R + 1]``, cumulative token counts.
    """
    starts = query_start_loc.cpu().numpy().astype(np.int64)
    counts = -(-np.diff(starts) // CHUNK_SIZE)
    row = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[row] + number * CHUNK_SIZE
    table = np.stack((first, np.minimum(CHUNK_SIZE, starts[row + 1] - first)), axis=1)
    return torch.from_numpy(table.astype(np.int32)).to(query_start_loc.device)


def _segments(
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    size: int,
    most: int,
    device: torch.device,
) -> tuple[_Segment, ...]:
    counts = -(-lengths // size)
    active = [int((counts > step).sum()) for step in range(int(counts[0]))]
    segments = []
    step = 0
    while step < len(active):
        until = step + 1
        while until < len(active) and sum(active[step : until + 1]) <= most:
            until += 1
        row = np.concatenate([np.arange(count) for count in active[step:until]])
        first = np.repeat(np.arange(step, until), active[step:until]) * size
        place = first[:, None] + np.arange(size)
        inside = place < lengths[row, None]
        tokens = starts[row, None] + np.minimum(place, lengths[row, None] - 1)
        kept = np.flatnonzero(inside)
        segments.append(
            _Segment(
                tokens=torch.from_numpy(tokens).to(device),
                padding=torch.from_numpy(~inside).to(device),
                kept=torch.from_numpy(kept).to(device),
                targets=torch.from_numpy(tokens.reshape(-1)[kept]).to(device),
                active=tuple(active[step:until]),
            )
        )
        step = until
    return tuple(segments)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    plan: ChunkPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Take in all tokens of every row of a plan.

    Parameters
    ----------
    q, k : Tensor
        ``[T, Hk, dk]`` float32, packed, l2-normed, `q` scaled by ``dk ** -0.5``.
    v : Tensor
        ``[T, Hv, dv]`` float32.
    g, beta : Tensor
        ``[T, Hv]`` float32.
    states : Tensor
        ``[slots, Hv, dv, dk]`` float32, read and overwritten at `slots`.
    slots : Tensor
        ``[R]`` int64, no two alike.
    plan : ChunkPlan
    out : Tensor or None
        What to write to, if some rows are not in the plan: theirs is left as it is.

    Returns
    -------
    Tensor
        ``[T, Hv, dv]`` float32.
    """
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for batch in plan.batches:
        where = slots.index_select(0, batch.rows)
        state = states.index_select(0, where)
        for segment in batch.segments:
            _advance(q, k, v, g, beta, state, segment, out)
        states.index_copy_(0, where, state)
    return out


def _decay(log: Tensor) -> Tensor:
    return functional.threshold(log, _MIN_LOG_DECAY, -torch.inf).exp_()


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    segment: _Segment,
    out: Tensor,
) -> None:
    """Run one segment: `state` ``[rows, Hv, dv, dk]`` and `out` change in place."""
    chunks, size = segment.tokens.shape
    tokens = segment.tokens.view(-1)
    key_heads, value_heads = k.shape[1], v.shape[1]
    share = value_heads // key_heads

    def chunked(x: Tensor) -> Tensor:
        """``[T, h, ...]`` to ``[chunks, h, size, ...]``."""
        split = x.index_select(0, tokens).view(chunks, size, *x.shape[1:])
        return split.transpose(1, 2).contiguous()

    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        """``[chunks, Hk, size, n]`` by ``[chunks, Hv, size, m]``, m being 1 or n."""
        product = x.unsqueeze(2) * factor.view(chunks, key_heads, share, size, -1)
        return product.flatten(1, 2)

    q, k, v = chunked(q), chunked(k), chunked(v)
    padding = segment.padding.unsqueeze(1)
    total = chunked(g).masked_fill_(padding, 0.0).cumsum(dim=-1)
    beta = chunked(beta).masked_fill_(padding, 0.0)
    grown = _decay(total)

    identity = torch.eye(size, dtype=v.dtype, device=v.device)
    upper = torch.ones_like(identity, dtype=torch.bool).triu_(1)
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(upper, -torch.inf)
    decay = _decay(pairs)
    system = scaled(k @ k.mT, decay).mul_(beta.unsqueeze(-1))
    within = scaled(q @ k.mT, decay)
    inverse = torch.linalg.solve_triangular(
        system, identity.expand_as(system), upper=False, unitriangular=True
    )
    # Substitution multiplies small decays with each other once more.
    inverse = inverse.masked_fill_(decay == 0, 0.0)
    u = (inverse * beta.unsqueeze(-2)) @ v
    w = inverse @ scaled(k, beta * grown)
    w.masked_fill_((grown == 0).unsqueeze(-1), 0.0)
    q = scaled(q, grown)
    k = scaled(k, _decay(total[..., -1:] - total))
    last = grown[:, :, -1:, None]

    at = 0
    for count in segment.active:
        part = slice(at, at + count)
        at += count
        now = state[:count]
        added = u[part] - w[part] @ now.transpose(2, 3)
        read = q[part] @ now.transpose(2, 3) + within[part] @ added
        now.mul_(last[part]).add_(added.transpose(2, 3) @ k[part])
        u[part] = read
    flat = u.transpose(1, 2).reshape(chunks * size, value_heads, -1)
    out.index_copy_(0, segment.targets, flat.index_select(0, segment.kept))
