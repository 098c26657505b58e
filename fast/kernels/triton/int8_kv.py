"""Decode attention over INT8 pages with static per-channel scales (C8).

A tile of K or V is dequantised to bfloat16, as the device does it, and is then attended to as any
other. The cache is in the fractal layout: channel ``c`` of token ``s`` lies at
``[c // 32, s, c % 32]`` of its block and head.

Source: ``AscendC8AttentionBackendImpl`` of ``vllm_ascend/attention/attention_v1.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend
from servespec.fast.kernels.triton.attention import key_tile

__all__ = ["int8_attention_decode"]


@triton.jit
def _dequantize(Pages, Scale, place, block_size, seen, TILE: tl.constexpr, D: tl.constexpr):
    """Return a tile ``[TILE, D]`` in float32 with values of bfloat16."""
    part = tl.arange(0, D // 32)
    token = tl.arange(0, TILE)
    inner = tl.arange(0, 32)
    offset = part[:, None, None] * (block_size * 32) + token[None, :, None] * 32
    offset = offset + inner[None, None, :]
    integers = tl.load(Pages + place + offset, mask=seen[None, :, None], other=0)
    scale = tl.load(Scale + part[:, None] * 32 + inner[None, :]).to(tl.float32)
    values = (integers.to(tl.float32) * scale[:, None, :]).to(tl.bfloat16).to(tl.float32)
    return tl.reshape(tl.permute(values, (1, 0, 2)), (TILE, D))


@triton.jit
def _decode(
    Q, KeyPages, ValuePages, KeyScale, ValueScale, Table, Lengths, Out, scale,
    s_q, s_page, s_table, block_size, kv_heads,
    SHARE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(Lengths + row)
    h = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    n = tl.arange(0, TILE)
    q_place = row * s_q + (head * SHARE + h)[:, None] * D + d[None, :]
    q = tl.load(Q + q_place, mask=h[:, None] < SHARE, other=0.0).to(tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, TILE):
        page = tl.load(Table + row * s_table + start // block_size).to(tl.int64)
        place = page * s_page + head * D * block_size + (start % block_size) * 32
        seen = start + n < length
        k = _dequantize(KeyPages, KeyScale + head * D, place, block_size, seen, TILE, D)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -1e30)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - new_peak[:, None])
        fade = tl.exp(peak - new_peak)
        total = total * fade + tl.sum(weight, 1)
        v = _dequantize(ValuePages, ValueScale + head * D, place, block_size, seen, TILE, D)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weight, v, mixed, input_precision="ieee")
        peak = new_peak
    divisor = tl.where(total > 0.0, total, 1.0)
    o = (mixed / divisor[:, None]).to(Out.dtype.element_ty)
    index = (row * kv_heads + head) * SHARE + h
    tl.store(Out + index[:, None] * D + d[None, :], o, mask=h[:, None] < SHARE)


def int8_attention_decode(
    backend: Backend,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Attend with one query a row.

    Parameters
    ----------
    backend : Backend
    query : Tensor
        ``[R, H, D]``, its trailing axes contiguous.
    key_pages, value_pages : Tensor
        ``[num_blocks, G, D / 32, block_size, 32]`` int8; D / 32 is a power of two.
    key_scale, value_scale : Tensor
        ``[G, D]`` bfloat16, contiguous.
    block_table : Tensor
        ``[R, W]`` int32.
    seq_lens : Tensor
        ``[R]`` int32, keys of each row; a row of none gets zeros.
    scale : float
        Factor of the scores.

    Returns
    -------
    Tensor
        ``[R, H, D]`` in the dtype of the query.
    """
    rows, heads, dim = query.shape
    _, kv_heads, _, block_size, _ = key_pages.shape
    share = heads // kv_heads
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    backend.launch(
        _decode,
        (kv_heads, rows),
        *(query, key_pages, value_pages, key_scale, value_scale, block_table, seq_lens, out),
        *(scale, query.stride(0), key_pages.stride(0), block_table.stride(0)),
        *(block_size, kv_heads),
        SHARE=share,
        ROWS=max(triton.next_power_of_2(share), backend.min_dot),
        D=dim,
        TILE=key_tile(backend, block_size),
    )
    return out
