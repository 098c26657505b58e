"""Attention over INT8 pages with static per-channel scales (C8).

Every key and value is read back and dequantised to bfloat16, the step's own too, so that a row's
numbers depend on its own tokens alone, whatever else is in the batch (profile ``invariant``). The
cache is in the fractal layout: channel ``c`` of token ``s`` lies at ``[c // 32, s, c % 32]`` of its
block and head. The kernels are those of `servespec.fast.kernels.triton.attention`.

Source: ``AscendC8AttentionBackendImpl`` of ``vllm_ascend/attention/attention_v1.py``.
"""

from __future__ import annotations

from torch import Tensor

from servespec.fast.backends.base import Backend
from servespec.fast.kernels.triton.attention import Stored, decode, prefill

__all__ = ["int8_attention_decode", "int8_varlen_attention"]


def _stored(pages: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> Stored:
    """Describe pages in the fractal layout."""
    page, head, part, token, _ = pages[0].stride()
    _, kv_heads, _, block_size, _ = pages[0].shape
    return Stored(
        key=pages[0],
        value=pages[1],
        strides=(page, token, head, part),
        kv_heads=kv_heads,
        block_size=block_size,
        scales=scales,
    )


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
    *,
    parts: int = 1,
) -> Tensor:
    """Attend with one query a row.

    Parameters
    ----------
    backend : Backend
    query : Tensor
        ``[R, H, D]``, its trailing axes contiguous.
    key_pages, value_pages : Tensor
        ``[num_blocks, G, D / 32, block_size, 32]`` int8, alike in strides; D / 32 is a power of
        two. They hold the step's own K and V.
    key_scale, value_scale : Tensor
        ``[G, D]`` bfloat16, contiguous.
    block_table : Tensor
        ``[R, W]`` int32.
    seq_lens : Tensor
        ``[R]`` int32, keys of each row; a row of none gets zeros.
    scale : float
        Factor of the scores.
    parts : int
        Programs that share the keys of a row; their results are merged.

    Returns
    -------
    Tensor
        ``[R, H, D]`` in the dtype of the query.
    """
    stored = _stored((key_pages, value_pages), (key_scale, value_scale))
    return decode(backend, query, stored, block_table, seq_lens, scale, parts)


def int8_varlen_attention(
    backend: Backend,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """Attend with any number of queries a row.

    Parameters
    ----------
    backend : Backend
    query : Tensor
        ``[T, H, D]``, packed, its trailing axes contiguous.
    key_pages, value_pages, key_scale, value_scale, block_table, seq_lens, scale
        As for `int8_attention_decode`.
    query_start_loc : Tensor
        ``[R + 1]`` int32; rows may be empty.
    max_query_len : int
        Of the longest row.

    Returns
    -------
    Tensor
        ``[T, H, D]`` in the dtype of the query.
    """
    stored = _stored((key_pages, value_pages), (key_scale, value_scale))
    rows = (query_start_loc, query_start_loc, seq_lens)
    return prefill(backend, query, stored, block_table, rows, max_query_len, scale)
