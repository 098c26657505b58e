"""Causal attention over K and V in pages, in float or in 8 bits, or packed.

Every row is one equation: its last ``n`` tokens attend to its first ``m``, query ``i`` to the keys
``j <= i + m - n``; query head ``h`` reads K/V head ``h // (H / G)``. A program takes the keys tile
by tile and keeps a running maximum, sum and mixture (Milakov and Gimelshein, "Online normalizer
calculation for softmax", arXiv 1805.02867; Dao et al., "FlashAttention", arXiv 2205.14135).

Products of a tile below 32 keys are float32 whatever is stored: the compiler for A5 cannot do
others of that width.

A tile never reaches over the end of a block, so its keys are one strided read. Keys past the end
of a row are masked out of the read itself: what is stored there does not matter. A tile of 8 bits
is dequantised to bfloat16, as the device does it, and then attended to as any other, in float32.

Sources: ``npu_fused_infer_attention_score`` as vllm-ascend calls it (sparse mode 3, bottom-right
causal); ``Qwen3_5Attention`` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend, BackendError

__all__ = [
    "Stored",
    "decode",
    "packed_attention",
    "paged_attention_decode",
    "prefill",
    "varlen_attention",
]

_MAX_TILE = 64
_QUERY_TILE = 64
_NARROW_TILE = 32


@triton.jit
def _tile(
    Stored, Scale, place, s_slot, s_part, seen,
    TILE: tl.constexpr, D: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Return the keys or values ``[TILE, D]`` from an element on; 0 where they are not `seen`."""
    n = tl.arange(0, TILE)
    if INT8:
        part = tl.arange(0, D // 32)
        inner = tl.arange(0, 32)
        offset = part[:, None, None] * s_part + n[None, :, None] * s_slot + inner[None, None, :]
        integers = tl.load(Stored + place + offset, mask=seen[None, :, None], other=0)
        scale = tl.load(Scale + part[:, None] * 32 + inner[None, :]).to(tl.float32)
        values = (integers.to(tl.float32) * scale[:, None, :]).to(tl.bfloat16).to(tl.float32)
        tile = tl.reshape(tl.permute(values, (1, 0, 2)), (TILE, D))
    else:
        offset = n[:, None] * s_slot + tl.arange(0, D)[None, :]
        tile = tl.load(Stored + place + offset, mask=seen[:, None], other=0.0)
    return tile


@triton.jit
def _weigh(score, peak, total):
    """Return the weights of a tile, by what earlier ones fade, and the new peak and total.

    Loops replace their peak last: so the CPU's code is a quarter faster than if they do at once.
    """
    new_peak = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp(score - new_peak[:, None])
    fade = tl.exp(peak - new_peak)
    return weight, fade, new_peak, total * fade + tl.sum(weight, 1)


@triton.jit
def _decode(
    Q, Keys, Values, KeyScale, ValueScale, Table, Lengths, Out, LogSum, scale,
    s_q, s_page, s_slot, s_head, s_part, s_table, block_size, per_page, kv_heads,
    SHARE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, INT8: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(Lengths + row)
    h = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    n = tl.arange(0, TILE)
    q_place = row * s_q + (head * SHARE + h)[:, None] * D + d[None, :]
    if ROWS == SHARE:
        q = tl.load(Q + q_place)
    else:
        q = tl.load(Q + q_place, mask=h[:, None] < SHARE, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    tiles = tl.cdiv(length, TILE)
    share = tl.cdiv(tiles, PARTS)
    for tile in range(part * share, tl.minimum(tiles, (part + 1) * share)):
        start = tile * TILE
        entry = tl.load(Table + row * s_table + start // block_size).to(tl.int64)
        page = entry // per_page
        first = (entry - page * per_page) * block_size + start % block_size
        place = page * s_page + first * s_slot + head * s_head
        seen = start + n < length
        k = _tile(Keys, KeyScale + head * D, place, s_slot, s_part, seen, TILE, D, INT8)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -1e30)
        weight, fade, new_peak, total = _weigh(score, peak, total)
        v = _tile(Values, ValueScale + head * D, place, s_slot, s_part, seen, TILE, D, INT8)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weight.to(q.dtype), v.to(q.dtype), mixed, input_precision="ieee")
        peak = new_peak
    # A part without keys has total 0: its mixture is 0 and its weight in the merge is 0.
    divisor = tl.where(total > 0.0, total, 1.0)
    o = (mixed / divisor[:, None]).to(Out.dtype.element_ty)
    index = ((row * PARTS + part) * kv_heads + head) * SHARE + h
    o_place = index[:, None] * D + d[None, :]
    if ROWS == SHARE:
        tl.store(Out + o_place, o)
        if PARTS > 1:
            tl.store(LogSum + index, tl.where(total > 0.0, peak + tl.log(divisor), -1e30))
    else:
        tl.store(Out + o_place, o, mask=h[:, None] < SHARE)
        if PARTS > 1:
            log_sum = tl.where(total > 0.0, peak + tl.log(divisor), -1e30)
            tl.store(LogSum + index, log_sum, mask=h < SHARE)


@triton.jit
def _merge(Parts, LogSum, Out, heads, D: tl.constexpr, PARTS: tl.constexpr):
    head = tl.program_id(0)
    row = tl.program_id(1)
    d = tl.arange(0, D)
    peak = tl.load(LogSum + row * PARTS * heads + head)
    for part in range(1, PARTS):
        peak = tl.maximum(peak, tl.load(LogSum + (row * PARTS + part) * heads + head))
    total = 0.0
    mixed = tl.zeros([D], tl.float32)
    for part in range(PARTS):
        index = (row * PARTS + part) * heads + head
        log_sum = tl.load(LogSum + index)
        weight = tl.where(log_sum > -1e29, tl.exp(log_sum - peak), 0.0)
        mixed += weight * tl.load(Parts + index * D + d)
        total += weight
    divisor = tl.where(total > 0.0, total, 1.0)
    tl.store(Out + (row * heads + head) * D + d, (mixed / divisor).to(Out.dtype.element_ty))


@triton.jit
def _prefill(
    Q, Keys, Values, KeyScale, ValueScale, Table, Starts, KeyStarts, Lengths, Out, scale,
    s_q, s_page, s_slot, s_head, s_part, s_table, block_size, per_page, heads, share,
    D: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr,
    INT8: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.program_id(2)
    first = tl.load(Starts + row)
    count = tl.load(Starts + row + 1) - first
    if block * QUERIES < count:
        length = tl.load(Lengths + row)
        context = length - count
        kv_head = head // share
        i = block * QUERIES + tl.arange(0, QUERIES)
        d = tl.arange(0, D)
        n = tl.arange(0, TILE)
        q = tl.load(
            Q + (first + i)[:, None] * s_q + head * D + d[None, :],
            mask=i[:, None] < count,
            other=0.0,
        )
        if WIDE:
            q = q.to(tl.float32)
        peak = tl.full([QUERIES], -1e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, D], tl.float32)
        last = context + tl.minimum(count, (block + 1) * QUERIES)
        for start in range(0, last, TILE):
            if PAGED:
                entry = tl.load(Table + row * s_table + start // block_size).to(tl.int64)
                page = entry // per_page
                slot = (entry - page * per_page) * block_size + start % block_size
                place = page * s_page + slot * s_slot
            else:
                place = (tl.load(KeyStarts + row) + start).to(tl.int64) * s_slot
            place = place + kv_head * s_head
            key = start + n
            seen = key < length
            k = _tile(Keys, KeyScale + kv_head * D, place, s_slot, s_part, seen, TILE, D, INT8)
            score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
            score = tl.where(key[None, :] <= context + i[:, None], score, -1e30)
            weight, fade, new_peak, total = _weigh(score, peak, total)
            v = _tile(Values, ValueScale + kv_head * D, place, s_slot, s_part, seen, TILE, D, INT8)
            mixed = mixed * fade[:, None]
            mixed = tl.dot(weight.to(q.dtype), v.to(q.dtype), mixed, input_precision="ieee")
            peak = new_peak
        tl.store(
            Out + ((first + i)[:, None] * heads + head) * D + d[None, :],
            (mixed / total[:, None]).to(Out.dtype.element_ty),
            mask=i[:, None] < count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """K and V as they are stored, alike in strides.

    Attributes
    ----------
    key, value : Tensor
    strides : tuple of int
        From a page, a token, a head and 32 channels to the next.
    kv_heads : int
    block_size : int
        Tokens that one entry of a table covers.
    per_page : int
        Such entries of a page.
    scales : tuple of Tensor or None
        ``[G, D]`` bfloat16, contiguous, of keys and of values; None: stored in float.
    """

    key: Tensor
    value: Tensor
    strides: tuple[int, int, int, int]
    kv_heads: int
    block_size: int
    per_page: int = 1
    scales: tuple[Tensor, Tensor] | None = None

    @classmethod
    def in_float(cls, key: Tensor, value: Tensor, block_size: int | None) -> Stored:
        """Describe ``[pages, tokens, G, D]``, whose entries cover a page or less."""
        page, token, head, _ = key.stride()
        entry = block_size or key.shape[1]
        return cls(
            key=key,
            value=value,
            strides=(page, token, head, 32),
            kv_heads=key.shape[2],
            block_size=entry,
            per_page=key.shape[1] // entry,
        )

    def key_tile(self, backend: Backend) -> int:
        """Return the largest power of two up to 64 that divides the block size.

        Raises
        ------
        BackendError
            It is too small for the backend.
        """
        tile = min(self.block_size & -self.block_size, _MAX_TILE)
        if tile < backend.min_dot:
            raise BackendError(
                f"block size {self.block_size} is not possible on {backend.name}:"
                f" must be a multiple of {backend.min_dot}"
            )
        return tile


def decode(
    backend: Backend,
    query: Tensor,
    stored: Stored,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    parts: int,
) -> Tensor:
    """Attend with one query a row; see `paged_attention_decode`."""
    rows, heads, dim = query.shape
    share = heads // stored.kv_heads
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    partial = log_sum = out
    if parts > 1:
        log_sum = query.new_empty((rows, parts, heads), dtype=torch.float32)
        partial = query.new_empty((rows, parts, heads, dim), dtype=torch.float32)
    tile = stored.key_tile(backend)
    backend.launch(
        _decode,
        (stored.kv_heads, rows, parts),
        *(query, stored.key, stored.value, *(stored.scales or (query, query))),
        *(block_table, seq_lens, partial, log_sum, scale),
        *(query.stride(0), *stored.strides, block_table.stride(0)),
        *(stored.block_size, stored.per_page, stored.kv_heads),
        SHARE=share,
        ROWS=max(triton.next_power_of_2(share), backend.min_dot),
        D=dim,
        TILE=tile,
        PARTS=parts,
        INT8=stored.scales is not None,
        WIDE=stored.scales is not None or tile < _NARROW_TILE,
    )
    if parts > 1:
        backend.launch(_merge, (heads, rows), partial, log_sum, out, heads, D=dim, PARTS=parts)
    return out


def prefill(
    backend: Backend,
    query: Tensor,
    stored: Stored,
    table: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    max_query_len: int,
    scale: float,
    *,
    paged: bool = True,
) -> Tensor:
    """Attend with any number of queries a row; see `varlen_attention`, `packed_attention`.

    `rows` are where queries and, if packed, keys of each row start, and how many keys it has.
    """
    _, heads, dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # Dequantising a tile needs room of its own: at 256 channels half as many queries fit beside it.
    most = _QUERY_TILE // 2 if stored.scales is not None and dim > 128 else _QUERY_TILE
    queries = max(min(most, triton.next_power_of_2(max_query_len)), backend.min_dot)
    tile = stored.key_tile(backend)
    backend.launch(
        _prefill,
        (heads, triton.cdiv(max_query_len, queries), len(rows[2])),
        *(query, stored.key, stored.value, *(stored.scales or (query, query))),
        *(table, *rows, out, scale),
        *(query.stride(0), *stored.strides, table.stride(0)),
        *(stored.block_size, stored.per_page, heads, heads // stored.kv_heads),
        D=dim,
        QUERIES=queries,
        TILE=tile,
        PAGED=paged,
        INT8=stored.scales is not None,
        WIDE=stored.scales is not None or tile < _NARROW_TILE,
    )
    return out


def paged_attention_decode(
    backend: Backend,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    kernel_block_size: int | None = None,
    parts: int = 1,
) -> Tensor:
    """Attend with one query a row.

    Parameters
    ----------
    backend : Backend
    query : Tensor
        ``[R, H, D]`` in the dtype of the cache, its trailing axes contiguous.
    key_pages, value_pages : Tensor
        ``[num_blocks, block_size, G, D]``, alike in strides; they hold the step's own K and V.
    block_table : Tensor
        ``[R, W]`` int32, kernel blocks.
    seq_lens : Tensor
        ``[R]`` int32, keys of each row; a row of none gets zeros.
    scale : float
        Factor of the scores.
    kernel_block_size : int or None
        Tokens that one entry of the table covers, a divisor of the block size; None: all.
    parts : int
        Programs that share the keys of a row; their results are merged.

    Returns
    -------
    Tensor
        ``[R, H, D]`` in the dtype of the query.
    """
    pages = Stored.in_float(key_pages, value_pages, kernel_block_size)
    return decode(backend, query, pages, block_table, seq_lens, scale, parts)


def varlen_attention(
    backend: Backend,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    *,
    kernel_block_size: int | None = None,
) -> Tensor:
    """Attend with any number of queries a row, over pages.

    Parameters
    ----------
    backend : Backend
    query : Tensor
        ``[T, H, D]`` in the dtype of the cache, packed, its trailing axes contiguous.
    key_pages, value_pages, block_table, seq_lens, scale, kernel_block_size
        As for `paged_attention_decode`.
    query_start_loc : Tensor
        ``[R + 1]`` int32; rows may be empty.
    max_query_len : int
        Of the longest row.

    Returns
    -------
    Tensor
        ``[T, H, D]`` in the dtype of the query.
    """
    pages = Stored.in_float(key_pages, value_pages, kernel_block_size)
    rows = (query_start_loc, query_start_loc, seq_lens)
    return prefill(backend, query, pages, block_table, rows, max_query_len, scale)


def packed_attention(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """Attend with any number of queries a row, over packed K and V.

    Parameters
    ----------
    backend : Backend
    query, query_start_loc, seq_lens, max_query_len, scale
        As for `varlen_attention`.
    key, value : Tensor
        ``[S, G, D]``, alike in strides.
    key_start_loc : Tensor
        ``[R + 1]`` int32: row ``r`` has the keys from ``key_start_loc[r]`` on.

    Returns
    -------
    Tensor
        ``[T, H, D]`` in the dtype of the query.
    """
    stored = Stored.in_float(key.unsqueeze(0), value.unsqueeze(0), _MAX_TILE)
    rows = (query_start_loc, key_start_loc, seq_lens)
    table = key_start_loc.unsqueeze(0)
    return prefill(backend, query, stored, table, rows, max_query_len, scale, paged=False)
