"""K and V in 8 bits with a static scale for each channel (C8).

Tokens are quantised when they are written and dequantised when they are read. What a step reads
back of its own tokens therefore differs a little from what it wrote, and the pinned code reads its
own tokens back only sometimes: the prefills of a step use their K and V unquantised if every one
of them is new, and quantised if any one continues. So a request's numbers depend on its batch
mates there (profile ``pinned``). The profile ``invariant`` always reads back; then they depend on
the request's own tokens alone, however it is batched or cut into chunks.

Source: ``AscendC8AttentionBackendImpl`` of ``vllm_ascend/attention/attention_v1.py``. How the
fused operator rounds while it dequantises inside is not known; here it is the product rounded to
bfloat16, as in the path that gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import AttentionMetadata, AttentionState, ConfigError
from servespec.reference.numerics.arrays import Array, frozen
from servespec.reference.numerics.bfloat16 import round_bfloat16
from servespec.reference.numerics.layouts import nz_pages, rows_attention, rows_of_packed

__all__ = [
    "Int8Pages",
    "Int8Profile",
    "Int8Scales",
    "dequantize",
    "gather_rows",
    "int8_attention",
    "int8_operands",
    "int8_scales",
    "quantize",
    "rows_kept_float",
    "write_tokens",
]

Int8 = npt.NDArray[np.int8]
Int8Profile = Literal["pinned", "invariant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Scales:
    """Scales of one layer.

    Attributes
    ----------
    key, value : numpy.ndarray
        ``[K/V heads, head_dim]`` with values of bfloat16: the size of one step of the integers.
    """

    key: Array
    value: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Pages:
    """The cache of one layer.

    Attributes
    ----------
    key, value : numpy.ndarray
        ``[blocks, block_size, K/V heads, head_dim]`` int8 memory in the NZ layout
        (`layouts.nz_pages`), read-only.
    """

    key: Int8
    value: Int8


def int8_scales(
    key_scale: npt.ArrayLike,
    value_scale: npt.ArrayLike,
    num_kv_heads: int,
    head_dim: int,
    key_offset: npt.ArrayLike = 0.0,
    value_offset: npt.ArrayLike = 0.0,
) -> Int8Scales:
    """Check the scales of a checkpoint.

    Parameters
    ----------
    key_scale, value_scale : array_like
        ``[K/V heads * head_dim]``, positive.
    num_kv_heads, head_dim : int
    key_offset, value_offset : array_like
        Must be 0: every way of reading back ignores them, so any other would be lost.

    Returns
    -------
    Int8Scales

    Raises
    ------
    ConfigError
    """
    for name, offset in (("key_offset", key_offset), ("value_offset", value_offset)):
        largest = float(np.abs(np.asarray(offset, np.float64)).max())
        if largest != 0:
            raise ConfigError(f"Int8Scales.{name}", largest, "0 for every channel")
    checked = []
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        array = np.asarray(scale, np.float64)
        if array.size != num_kv_heads * head_dim:
            raise ConfigError(
                f"Int8Scales.{name}",
                f"of {array.size} values",
                f"one value a channel, {num_kv_heads} heads of {head_dim}",
            )
        if not np.all((array > 0) & np.isfinite(array)):
            raise ConfigError(f"Int8Scales.{name}", float(array.min()), "positive and finite")
        checked.append(round_bfloat16(array.reshape(num_kv_heads, head_dim)))
    return Int8Scales(key=checked[0], value=checked[1])


def quantize(values: npt.ArrayLike, scale: Array) -> Int8:
    """Quantise tokens.

    The reciprocal of the scale, its product with the value and the integer are each rounded to
    bfloat16; integers are the nearest, halves to even, and saturate.

    Parameters
    ----------
    values : array_like
        ``[T, K/V heads, head_dim]`` with values of bfloat16.
    scale : numpy.ndarray
        ``[K/V heads, head_dim]`` with values of bfloat16.

    Returns
    -------
    numpy.ndarray
        int8, read-only.
    """
    inverse = round_bfloat16(np.float32(1) / scale.astype(np.float32))
    scaled = round_bfloat16(np.asarray(values, np.float64) * inverse)
    integers = np.clip(np.rint(scaled), -128, 127).astype(np.int8)
    integers.flags.writeable = False
    return integers


def dequantize(integers: Int8, scale: Array) -> Array:
    """Return what the integers stand for, rounded to bfloat16.

    Parameters
    ----------
    integers : numpy.ndarray
        ``[T, K/V heads, head_dim]`` int8.
    scale : numpy.ndarray
        ``[K/V heads, head_dim]`` with values of bfloat16.

    Returns
    -------
    numpy.ndarray
    """
    return round_bfloat16(integers.astype(np.float64) * scale)


def write_tokens(pages: Int8, slot_mapping: Sequence[int], integers: Int8) -> Int8:
    """Write tokens to their slots of one cache.

    Parameters
    ----------
    pages : numpy.ndarray
        ``[blocks, block_size, K/V heads, head_dim]`` int8 memory in the NZ layout.
    slot_mapping : sequence of int
        Slot of each token; -1 writes nothing.
    integers : numpy.ndarray
        ``[T, K/V heads, head_dim]`` int8.

    Returns
    -------
    numpy.ndarray
        The cache with the tokens, read-only.
    """
    written = pages.copy()
    fractal = nz_pages(written)
    block_size = pages.shape[1]
    for slot, token in zip(slot_mapping, integers, strict=True):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            fractal[block, :, :, offset] = token.reshape(fractal.shape[1], fractal.shape[2], -1)
    written.flags.writeable = False
    return written


def gather_rows(
    pages: Int8, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
) -> tuple[Int8, ...]:
    """Gather the tokens of each row.

    Parameters
    ----------
    pages : numpy.ndarray
        ``[blocks, block_size, K/V heads, head_dim]`` int8 memory in the NZ layout.
    block_tables : sequence of sequence of int
    seq_lens : sequence of int

    Returns
    -------
    tuple of numpy.ndarray
        ``[seq_len, K/V heads, head_dim]`` int8 each.
    """
    _, _, heads, dim = pages.shape
    tokens_first = nz_pages(pages).transpose(0, 3, 1, 2, 4)
    return tuple(
        tokens_first[list(table)].reshape(-1, heads, dim)[:seq_len]
        for table, seq_len in zip(block_tables, seq_lens, strict=True)
    )


def rows_kept_float(metadata: AttentionMetadata, profile: Int8Profile) -> tuple[bool, ...]:
    """Tell which rows attend to their own K and V as they were before quantisation.

    Parameters
    ----------
    metadata : AttentionMetadata
    profile : {"pinned", "invariant"}

    Returns
    -------
    tuple of bool

    Raises
    ------
    ValueError
        Under ``pinned``, if a mixed step has a decode row of several tokens: the operator is then
        called with more queries than rows of the table.
    """
    rows = len(metadata.seq_lens)
    if profile == "invariant":
        return (False,) * rows
    if metadata.attn_state is AttentionState.PREFILL_NO_CACHE:
        return (True,) * rows
    if metadata.attn_state is not AttentionState.CHUNKED_PREFILL:
        return (False,) * rows
    if metadata.num_decode_tokens != metadata.num_decodes:
        raise ValueError(
            f"AttentionMetadata.num_decode_tokens is {metadata.num_decode_tokens}: must be "
            f"num_decodes = {metadata.num_decodes} in a mixed step with INT8 K/V"
        )
    decodes = metadata.num_decodes
    starts = metadata.query_start_loc
    all_new = all(
        metadata.seq_lens[row] <= starts[row + 1] - starts[row] for row in range(decodes, rows)
    )
    return (False,) * decodes + (all_new,) * (rows - decodes)


def int8_operands(
    key: Array,
    value: Array,
    pages: Int8Pages,
    metadata: AttentionMetadata,
    scales: Int8Scales,
    profile: Int8Profile,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the K and V that each row attends to: read back, or its own as they were.

    Parameters
    ----------
    key, value, pages, metadata, scales, profile
        As for `int8_attention`.

    Returns
    -------
    keys, values : tuple of numpy.ndarray
        ``[seq_len, K/V heads, head_dim]`` for each row.
    """
    kept = rows_kept_float(metadata, profile)

    def rows(own: Array, cached: Int8, channel_scale: Array) -> tuple[Array, ...]:
        read = gather_rows(cached, metadata.block_tables, metadata.seq_lens)
        packed = rows_of_packed(own, metadata.actual_seq_lengths_q)
        return tuple(
            frozen(mine) if is_float else dequantize(integers, channel_scale)
            for mine, integers, is_float in zip(packed, read, kept, strict=True)
        )

    return rows(key, pages.key, scales.key), rows(value, pages.value, scales.value)


def int8_attention(
    query: Array,
    key: Array,
    value: Array,
    pages: Int8Pages,
    metadata: AttentionMetadata,
    scales: Int8Scales,
    scale: float,
    profile: Int8Profile,
) -> Array:
    """Attend with K and V in 8 bits.

    Parameters
    ----------
    query : numpy.ndarray
        ``[T, query heads, head_dim]``.
    key, value : numpy.ndarray
        ``[T, K/V heads, head_dim]``, the step's own before quantisation.
    pages : Int8Pages
        Hold the step's own tokens already.
    metadata : AttentionMetadata
    scales : Int8Scales
    scale : float
        Factor of the scores.
    profile : {"pinned", "invariant"}

    Returns
    -------
    numpy.ndarray
        ``[T, query heads, head_dim]``.
    """
    keys, values = int8_operands(key, value, pages, metadata, scales, profile)
    queries = rows_of_packed(query, metadata.actual_seq_lengths_q)
    return rows_attention(queries, keys, values, scale)
