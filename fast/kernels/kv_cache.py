"""Writing K and V to their pages.

Source: ``reshape_and_cache`` of vLLM 0.27.1 and vllm-ascend: slots name blocks and offsets, a
negative slot is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from servespec.fast.cache.memory import PagedKV

__all__ = ["SlotPlan", "packed_kv", "plan_slots", "write_kv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Rows of `PagedKV.rows` that a step writes; the same for every layer of a group.

    Attributes
    ----------
    key_rows, value_rows : Tensor
        ``[n]`` int64.
    tokens : Tensor or None
        ``[n]`` int64, the tokens that have a slot; None if all have.
    """

    key_rows: Tensor
    value_rows: Tensor
    tokens: Tensor | None


def plan_slots(slot_mapping: Tensor, kv: PagedKV) -> SlotPlan:
    """Turn slots into rows of the buffer.

    Parameters
    ----------
    slot_mapping : Tensor
        ``[T]`` int64, ``block * block_size + offset``; negative for padding.
    kv : PagedKV
        Any layer of the group.

    Returns
    -------
    SlotPlan
    """
    tokens = None
    if bool((slot_mapping < 0).any()):
        tokens = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping = slot_mapping[tokens]
    block = torch.div(slot_mapping, kv.block_size, rounding_mode="floor")
    key_rows = slot_mapping + block * (kv.rows_per_page - kv.block_size)
    return SlotPlan(key_rows=key_rows, value_rows=key_rows + kv.block_size, tokens=tokens)


def write_kv(key: Tensor, value: Tensor, kv: PagedKV, plan: SlotPlan) -> None:
    """Write each token's K and V to its slot.

    Parameters
    ----------
    key, value : Tensor
        ``[T, G, D]`` in the dtype of the cache.
    kv : PagedKV
        Changed in place.
    plan : SlotPlan
    """
    if plan.tokens is not None:
        key, value = key[plan.tokens], value[plan.tokens]
    kv.rows.index_copy_(0, plan.key_rows, key.flatten(1))
    kv.rows.index_copy_(0, plan.value_rows, value.flatten(1))


def packed_kv(key: Tensor, value: Tensor, seq_start_loc: Tensor) -> tuple[PagedKV, Tensor]:
    """View packed K and V as one page of kernel blocks of one token.

    Parameters
    ----------
    key, value : Tensor
        ``[S, G, D]``.
    seq_start_loc : Tensor
        ``[R + 1]`` cumulative tokens of the rows.

    Returns
    -------
    kv : PagedKV
        A copy.
    block_table : Tensor
        ``[R, W]`` int32; 0 fills shorter rows.
    """
    tokens = len(key)
    rows = torch.cat([key, value, torch.zeros_like(key[:1])]).flatten(1)
    lengths = seq_start_loc.diff()
    width = int(lengths.max()) if len(lengths) else 0
    column = torch.arange(width, device=key.device)
    table = (seq_start_loc[:-1, None] + column).where(column < lengths[:, None], 0)
    kv = PagedKV(
        key=rows[:tokens].view(1, *key.shape),
        value=rows[tokens : 2 * tokens].view(1, *key.shape),
        rows=rows,
        rows_per_page=2 * tokens,
        block_size=tokens,
        kernel_block_size=1,
        zero_row=2 * tokens,
    )
    return kv, table.to(torch.int32)
