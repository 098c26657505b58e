"""INT8 K/V with static per-channel scales (C8), as plain torch operations.

Quantisation runs in bfloat16, as the device does it. The cache is int8 memory in the fractal
layout: head h and channel c of token s of block b lie at ``[b, h, c // 32, s, c % 32]``.

A step reads back what it wrote, except that the profile ``pinned`` lets new prompts attend to
their own K and V as they were, if all prefills of the step are new ones.

Source: ``AscendC8AttentionBackendImpl`` of ``vllm_ascend/attention/attention_v1.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from servespec.reference.contracts import AttentionState, ConfigError

__all__ = [
    "Int8Cache",
    "Int8Step",
    "dequantize_int8",
    "float_prefills",
    "gather_int8",
    "int8_attention",
    "quantize_int8",
    "write_int8",
]

_NZ = 32


@dataclass(slots=True)
class Int8Cache:
    """K and V of one layer and their scales.

    Parameters
    ----------
    key, value : torch.Tensor
        ``[blocks, K/V heads, head_dim / 32, block_size, 32]`` int8, changed in place.
    key_scale, value_scale : torch.Tensor
        ``[K/V heads, head_dim]`` bfloat16, positive.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, key_scale: Tensor, value_scale: Tensor
    ) -> Int8Cache:
        """Make an empty cache.

        Parameters
        ----------
        num_blocks, block_size : int
        key_scale, value_scale : torch.Tensor
            ``[K/V heads, head_dim]``.

        Returns
        -------
        Int8Cache

        Raises
        ------
        ConfigError
        """
        for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            if scale.dim() != 2 or scale.shape[1] % _NZ:
                raise ConfigError(
                    f"Int8Cache.{name}",
                    tuple(scale.shape),
                    f"of shape (K/V heads, head_dim) with head_dim a multiple of {_NZ}",
                )
            if not bool((scale > 0).all()):
                raise ConfigError(f"Int8Cache.{name}", float(scale.min()), "positive")
        heads, dim = key_scale.shape
        shape = (num_blocks, heads, dim // _NZ, block_size, _NZ)
        return cls(
            torch.zeros(shape, dtype=torch.int8, device=key_scale.device),
            torch.zeros(shape, dtype=torch.int8, device=key_scale.device),
            key_scale.to(torch.bfloat16),
            value_scale.to(torch.bfloat16),
        )


@dataclass(slots=True, kw_only=True)
class Int8Step:
    """Where the rows of a step are; R rows, T tokens.

    Attributes
    ----------
    query_start_loc : torch.Tensor
        ``[R + 1]`` int32.
    seq_lens : torch.Tensor
        ``[R]`` int32.
    block_table : torch.Tensor
        ``[R, W]`` int32.
    num_decodes : int
        Leading rows that count as decodes.
    attn_state : AttentionState
        The stored label.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_decodes: int
    attn_state: AttentionState


def quantize_int8(values: Tensor, scale: Tensor) -> Tensor:
    """Quantise tokens: nearest integer, halves to even, saturating.

    Parameters
    ----------
    values : torch.Tensor
        ``[T, K/V heads, head_dim]``; taken as bfloat16.
    scale : torch.Tensor
        ``[K/V heads, head_dim]`` bfloat16.

    Returns
    -------
    torch.Tensor
        int8.
    """
    scaled = values.to(torch.bfloat16) * scale.reciprocal()
    return scaled.round_().clamp_(-128, 127).to(torch.int8)


def dequantize_int8(integers: Tensor, scale: Tensor) -> Tensor:
    """Return what integers stand for, in bfloat16.

    Parameters
    ----------
    integers : torch.Tensor
        ``[..., K/V heads, head_dim]`` int8.
    scale : torch.Tensor
        ``[K/V heads, head_dim]`` bfloat16.

    Returns
    -------
    torch.Tensor
    """
    return integers.to(torch.bfloat16) * scale


def write_int8(cache: Int8Cache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Quantise a step's K and V into their slots.

    Parameters
    ----------
    cache : Int8Cache
    key, value : torch.Tensor
        ``[T, K/V heads, head_dim]``.
    slot_mapping : torch.Tensor
        ``[T]`` int64; negative for padding.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = cache.key.shape[3]
    block, offset = torch.div(slots, block_size, rounding_mode="floor"), slots % block_size
    for pages, tokens, scale in (
        (cache.key, key, cache.key_scale),
        (cache.value, value, cache.value_scale),
    ):
        integers = quantize_int8(tokens[kept], scale)
        pages[block, :, :, offset] = integers.view(len(slots), *pages.shape[1:3], _NZ)


def gather_int8(pages: Tensor, block_table: Tensor) -> Tensor:
    """Gather the blocks of every row.

    Parameters
    ----------
    pages : torch.Tensor
        ``[blocks, K/V heads, head_dim / 32, block_size, 32]`` int8.
    block_table : torch.Tensor
        ``[R, W]``.

    Returns
    -------
    torch.Tensor
        ``[R, W * block_size, K/V heads, head_dim]`` int8.
    """
    rows, width = block_table.shape
    _, heads, parts, block_size, _ = pages.shape
    gathered = pages[block_table.reshape(-1).long()].permute(0, 3, 1, 2, 4)
    return gathered.reshape(rows, width * block_size, heads, parts * _NZ)


def float_prefills(step: Int8Step, profile: Literal["pinned", "invariant"]) -> int:
    """Return from which row on rows use their K and V as they were; R means none does.

    Parameters
    ----------
    step : Int8Step
    profile : {"pinned", "invariant"}

    Returns
    -------
    int

    Raises
    ------
    ValueError
        Under ``pinned``, a decode row of a mixed step has several tokens.
    """
    rows = len(step.seq_lens)
    if profile == "invariant":
        return rows
    if step.attn_state is AttentionState.PREFILL_NO_CACHE:
        return 0
    if step.attn_state is not AttentionState.CHUNKED_PREFILL:
        return rows
    tokens = int(step.query_start_loc[step.num_decodes])
    if tokens != step.num_decodes:
        raise ValueError(
            f"Int8Step.num_decodes is {step.num_decodes}: a mixed step with INT8 K/V must have "
            f"one token in each decode row, not {tokens} in all"
        )
    lengths = step.query_start_loc.diff()[step.num_decodes :]
    all_new = bool((step.seq_lens[step.num_decodes :] <= lengths).all())
    return step.num_decodes if all_new else rows


def int8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Int8Cache,
    step: Int8Step,
    scale: float,
    profile: Literal["pinned", "invariant"],
) -> Tensor:
    """Attend with K and V in 8 bits, all rows at once.

    Parameters
    ----------
    query : torch.Tensor
        ``[T, query heads, head_dim]``.
    key, value : torch.Tensor
        ``[T, K/V heads, head_dim]``, the step's own before quantisation.
    cache : Int8Cache
        Holds the step's own tokens already.
    step : Int8Step
    scale : float
        Factor of the scores.
    profile : {"pinned", "invariant"}

    Returns
    -------
    torch.Tensor
        ``[T, query heads, head_dim]`` in the dtype of the query.
    """
    starts, seq_lens = step.query_start_loc.long(), step.seq_lens.long()
    lengths = starts.diff()
    row_of = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths)
    offset = torch.arange(len(query), device=query.device) - starts[row_of]
    keys = dequantize_int8(gather_int8(cache.key, step.block_table), cache.key_scale)
    values = dequantize_int8(gather_int8(cache.value, step.block_table), cache.value_scale)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    own = row_of >= float_prefills(step, profile)
    # Rows that keep their own K and V are new prompts, whose tokens are the positions from 0.
    keys[row_of[own], offset[own]] = key[own].to(query.dtype)
    values[row_of[own], offset[own]] = value[own].to(query.dtype)

    widest = int(lengths.max())
    padded = query.new_zeros((len(lengths), widest, *query.shape[1:]))
    padded[row_of, offset] = query
    position = torch.arange(keys.shape[1], device=query.device)
    last = (seq_lens - lengths)[:, None] + torch.arange(widest, device=query.device)
    mask = position <= last.minimum(seq_lens[:, None] - 1)[:, :, None]
    attended = functional.scaled_dot_product_attention(
        padded.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return attended.transpose(1, 2)[row_of, offset]
