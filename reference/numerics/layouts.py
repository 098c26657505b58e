"""One attention equation, however its operands are laid out.

The fused operator of Ascend is called with packed tensors (TND: tokens, heads, dimensions), with
one token a row (BNSD: batch, heads, sequence, dimensions) and with pages of a cache. All of these
are views: a row's queries, keys and values are the same numbers wherever they lie, and what is
computed of them is `attention.attention`. Attention states only choose among the views.

Where descriptions of the backend say that decodes and prefills of a mixed step go to kernels in
layouts of their own, the pinned code does that for INT8 K/V and for one device generation only. A
mixed bfloat16 step is one packed call that ignores where the metadata divide it.

Source: ``npu_fused_infer_attention_score`` as ``vllm_ascend/attention/attention_v1.py`` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from servespec.reference.numerics.arrays import Array, frozen
from servespec.reference.numerics.attention import attention

__all__ = [
    "NZ_WIDTH",
    "bnsd",
    "causal_mask",
    "nz_pages",
    "packed_attention",
    "paged_attention",
    "rows_attention",
    "rows_of_packed",
    "rows_of_pages",
    "tnd",
]

# Channels of a fractal block of one byte each.
NZ_WIDTH = 32

AnyArray = npt.NDArray[Any]


def causal_mask(size: int = 2048) -> npt.NDArray[np.int8]:
    """Return the mask that sparse mode 3 is given: 1 strictly above the diagonal.

    The operator reads it as a pattern that repeats, aligned to the bottom right corner of each
    row's score matrix; its size bounds no sequence.

    Parameters
    ----------
    size : int

    Returns
    -------
    numpy.ndarray
        ``[size, size]`` int8.
    """
    mask = np.triu(np.ones((size, size), np.int8), 1)
    mask.flags.writeable = False
    return mask


def bnsd(tokens: AnyArray) -> AnyArray:
    """View packed tokens, one a row, as a batch of sequences of one token.

    Parameters
    ----------
    tokens : numpy.ndarray
        ``[T, heads, dimensions]``.

    Returns
    -------
    numpy.ndarray
        ``[T, heads, 1, dimensions]``.
    """
    return tokens[:, :, None, :]


def tnd(sequences: AnyArray) -> AnyArray:
    """View a batch of sequences of one token as packed tokens; undoes `bnsd`.

    Parameters
    ----------
    sequences : numpy.ndarray
        ``[B, heads, 1, dimensions]``.

    Returns
    -------
    numpy.ndarray
        ``[B, heads, dimensions]``.
    """
    return sequences[:, :, 0, :]


def nz_pages(pages: AnyArray) -> AnyArray:
    """View the memory of a cache in the fractal layout.

    The same bytes are read in another order: what `pages` calls block, token, head and channel
    means nothing there. Head ``h`` and channel ``c`` of token ``s`` of block ``b`` are at
    ``[b, h, c // 32, s, c % 32]`` of the result.

    Parameters
    ----------
    pages : numpy.ndarray
        ``[blocks, block_size, K/V heads, head_dim]``, C-contiguous.

    Returns
    -------
    numpy.ndarray
        ``[blocks, K/V heads, head_dim / 32, block_size, 32]``, a view.

    Raises
    ------
    ValueError
        If `head_dim` is no multiple of 32.
    """
    blocks, block_size, heads, dim = pages.shape
    if dim % NZ_WIDTH:
        raise ValueError(f"head_dim is {dim}: must be a multiple of {NZ_WIDTH} in the NZ layout")
    return pages.reshape(blocks, heads, dim // NZ_WIDTH, block_size, NZ_WIDTH)


def rows_of_packed(tokens: AnyArray, lengths: Sequence[int]) -> tuple[AnyArray, ...]:
    """Cut packed tokens into rows.

    Parameters
    ----------
    tokens : numpy.ndarray
        ``[T, ...]``.
    lengths : sequence of int
        Cumulative, without the leading 0, as ``actual_seq_lengths`` are.

    Returns
    -------
    tuple of numpy.ndarray
    """
    starts = (0, *lengths)
    return tuple(tokens[start:end] for start, end in zip(starts, lengths, strict=False))


def rows_of_pages(
    pages: AnyArray, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
) -> tuple[AnyArray, ...]:
    """Gather the tokens of each row from a cache.

    Parameters
    ----------
    pages : numpy.ndarray
        ``[blocks, block_size, K/V heads, head_dim]``.
    block_tables : sequence of sequence of int
        Kernel blocks of each row.
    seq_lens : sequence of int
        Tokens of each row, not cumulative.

    Returns
    -------
    tuple of numpy.ndarray
    """
    _, _, heads, dim = pages.shape
    return tuple(
        pages[list(table)].reshape(-1, heads, dim)[:seq_len]
        for table, seq_len in zip(block_tables, seq_lens, strict=True)
    )


def rows_attention(
    queries: Sequence[Array], keys: Sequence[Array], values: Sequence[Array], scale: float
) -> Array:
    """Attend row by row and pack the results.

    Parameters
    ----------
    queries, keys, values : sequence of numpy.ndarray
        One array a row, as `attention.attention` takes them.
    scale : float

    Returns
    -------
    numpy.ndarray
        ``[T, query heads, head_dim]``.
    """
    rows = zip(queries, keys, values, strict=True)
    return frozen(np.concatenate([attention(*row, scale) for row in rows]))


def packed_attention(
    query: Array,
    key: Array,
    value: Array,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    scale: float,
) -> Array:
    """Attend with everything packed.

    Parameters
    ----------
    query : numpy.ndarray
        ``[T, query heads, head_dim]``.
    key, value : numpy.ndarray
        ``[S, K/V heads, head_dim]``.
    actual_seq_lengths, actual_seq_lengths_kv : sequence of int
        Cumulative tokens of the rows.
    scale : float

    Returns
    -------
    numpy.ndarray
        ``[T, query heads, head_dim]``.
    """
    return rows_attention(
        rows_of_packed(query, actual_seq_lengths),
        rows_of_packed(key, actual_seq_lengths_kv),
        rows_of_packed(value, actual_seq_lengths_kv),
        scale,
    )


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    actual_seq_lengths: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    scale: float,
) -> Array:
    """Attend with packed queries to keys and values in pages.

    Parameters
    ----------
    query : numpy.ndarray
        ``[T, query heads, head_dim]``.
    key_pages, value_pages : numpy.ndarray
        ``[blocks, block_size, K/V heads, head_dim]``; hold the step's own tokens already.
    actual_seq_lengths : sequence of int
        Cumulative query tokens of the rows.
    block_tables : sequence of sequence of int
    seq_lens : sequence of int
        Tokens of each row, not cumulative.
    scale : float

    Returns
    -------
    numpy.ndarray
        ``[T, query heads, head_dim]``.
    """
    return rows_attention(
        rows_of_packed(query, actual_seq_lengths),
        rows_of_pages(key_pages, block_tables, seq_lens),
        rows_of_pages(value_pages, block_tables, seq_lens),
        scale,
    )
