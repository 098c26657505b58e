"""Causal attention of packed queries over paged K and V.

Every row of the batch is one equation, whatever its state is called: its last ``n`` tokens attend
to its first ``m``, query ``i`` to the keys ``j <= i + m - n``; query head ``h`` reads K/V head
``h // (H / G)``; logits are scaled by ``D ** -0.5``.

The plan, made once a step, cuts the queries of all rows into tiles of at most 64 and brings tiles
of similar key length together, so that padding stays below a third of the keys. A group of tiles
then is one gather of K and V, row by row from the pages, and one batched attention; groups are
kept small enough to stay in the cache between the two. Keys past the end of a tile are read from
the row of zeros, so nothing stale is ever loaded.

Sources: ``npu_fused_infer_attention_score`` as vllm-ascend calls it (sparse mode 3, bottom-right
causal); ``Qwen3_5Attention`` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from servespec.fast.cache.memory import PagedKV

__all__ = ["AttentionPlan", "plan_attention", "varlen_attention"]

_MAX_TILE = 64
_MIN_FILL = 0.75
# Gathered elements of K and V in one group; 2 MiB in float32.
_MAX_GATHER = 1 << 19

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Tiles of one query width, their keys padded to one length L.

    `tokens` ``[n, width]``: packed indices of the queries, `T` where a tile is not full;
    `limits` ``[n, width]``: keys each query sees; `key_rows` and `value_rows` ``[n * L]``.
    """

    tokens: Tensor
    limits: Tensor
    key_rows: Tensor
    value_rows: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's queries meet their keys; the same for every layer of a group."""

    groups: tuple[_Group, ...]


def plan_attention(
    query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, kv: PagedKV
) -> AttentionPlan:
    """Divide a step into groups of tiles.

    Parameters
    ----------
    query_start_loc : Tensor
        ``[R + 1]`` int32, cumulative query counts.
    seq_lens : Tensor
        ``[R]`` int32, keys of each row, the step's own included.
    block_table : Tensor
        ``[R, W]`` int32, kernel blocks.
    kv : PagedKV
        Any layer of the group.

    Returns
    -------
    AttentionPlan
    """
    device = block_table.device
    starts = query_start_loc.cpu().numpy().astype(np.int64)
    lengths = np.diff(starts)
    ends = seq_lens.cpu().numpy().astype(np.int64)
    table = block_table.cpu().numpy()
    total = int(starts[-1])

    # The width depends on the row alone, so that batch mates don't change a row's tiles.
    width = np.minimum(_MAX_TILE, 1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    tiles = -(-lengths // width)
    row = np.repeat(np.arange(len(lengths)), tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * width[row]
    last = np.minimum(first + width[row], lengths[row])
    context = ends[row] - lengths[row]
    keys = context + last

    groups = []
    order = np.lexsort((-keys, width[row]))
    at = 0
    while at < len(order):
        longest = int(keys[order[at]])
        tile = int(width[row[order[at]]])
        size = max(1, _MAX_GATHER // (2 * longest * kv.rows.shape[1]))
        chosen = order[at : at + size]
        alike = (keys[chosen] >= _MIN_FILL * longest) & (width[row[chosen]] == tile)
        chosen = chosen[: int(np.argmin(alike)) or len(chosen)]
        at += len(chosen)

        query = first[chosen, None] + np.arange(tile)
        inside = query < last[chosen, None]
        tokens = np.where(inside, starts[row[chosen], None] + query, total)
        limits = np.minimum(context[chosen, None] + query + 1, keys[chosen, None])
        key_rows, value_rows = _cache_rows(table[row[chosen]], keys[chosen], longest, kv)
        groups.append(
            _Group(
                tokens=torch.from_numpy(tokens).to(device),
                limits=torch.from_numpy(limits).to(device),
                key_rows=torch.from_numpy(key_rows).to(device),
                value_rows=torch.from_numpy(value_rows).to(device),
            )
        )
    return AttentionPlan(tuple(groups))


def _cache_rows(
    table: npt.NDArray[np.int32], keys: Ints, longest: int, kv: PagedKV
) -> tuple[Ints, Ints]:
    position = np.arange(longest)
    size = kv.kernel_block_size
    entries = table[:, : -(-longest // size)].astype(np.int64) * size
    slots = (entries[:, :, None] + np.arange(size)).reshape(len(table), -1)[:, :longest]
    rows = slots + slots // kv.block_size * (kv.rows_per_page - kv.block_size)
    seen = position < keys[:, None]
    key_rows = np.where(seen, rows, kv.zero_row)
    value_rows = np.where(seen, rows + kv.block_size, kv.zero_row)
    return key_rows.reshape(-1), value_rows.reshape(-1)


def varlen_attention(query: Tensor, kv: PagedKV, plan: AttentionPlan) -> Tensor:
    """Attend.

    Parameters
    ----------
    query : Tensor
        ``[T, H, D]`` in the dtype of the cache, normed and rotated.
    kv : PagedKV
        Already holds the step's own K and V.
    plan : AttentionPlan

    Returns
    -------
    Tensor
        ``[T, H, D]``.
    """
    total, heads, dim = query.shape
    kv_heads = kv.key.shape[2]
    # One row more, where the queries that only fill up a tile come from and go to.
    out = query.new_empty((total + 1, heads, dim))
    padded = query
    for group in plan.groups:
        tiles, width = group.tokens.shape
        keys = kv.rows.index_select(0, group.key_rows).view(tiles, -1, kv_heads, dim)
        values = kv.rows.index_select(0, group.value_rows).view(tiles, -1, kv_heads, dim)
        position = torch.arange(keys.shape[1], device=query.device)
        mask = (position < group.limits[..., None]).unsqueeze(1)
        tokens = group.tokens.view(-1)
        if width == 1:
            # The query heads of one K/V head are its queries, so that each key is read once.
            attended = functional.scaled_dot_product_attention(
                query.index_select(0, tokens).view(tiles, kv_heads, -1, dim),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask,
            ).view(tiles, heads, dim)
        else:
            if padded is query:
                padded = functional.pad(query, (0, 0, 0, 0, 0, 1))
            attended = (
                functional.scaled_dot_product_attention(
                    padded.index_select(0, tokens).view(tiles, width, heads, dim).transpose(1, 2),
                    keys.transpose(1, 2),
                    values.transpose(1, 2),
                    attn_mask=mask,
                    enable_gqa=True,
                )
                .transpose(1, 2)
                .reshape(-1, heads, dim)
            )
        out.index_copy_(0, tokens, attended)
    return out[:total]
