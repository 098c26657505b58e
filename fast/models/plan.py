"""What the layers of a step share: made when the first layer asks, used by every layer of a group.

Torch operations go by plans; kernels read the lengths, tables and slots themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from servespec.fast.batch.inputs import AttentionInputs, GdnInputs, StepInputs
from servespec.fast.cache.memory import CacheMemory, GdnStates, PagedKV
from servespec.fast.kernels.attention import AttentionPlan, plan_attention
from servespec.fast.kernels.chunk_gated_delta_rule import ChunkPlan, chunk_table, plan_chunks
from servespec.fast.kernels.convolution import ConvolutionPlan, plan_convolution
from servespec.fast.kernels.gated_delta_rule import evenly_spaced
from servespec.fast.kernels.kv_cache import SlotPlan, plan_slots

__all__ = ["AttentionRows", "AttentionStep", "GdnPrefill", "GdnStep", "StepPlan", "plan_step"]


class AttentionRows:
    """Rows of one kind, decodes or the others, in a full-attention group.

    Attributes
    ----------
    query_start_loc : Tensor
        ``[R + 1]`` int32, of these rows alone.
    seq_lens : Tensor
        ``[R]`` int32.
    block_table : Tensor
        ``[R, W]`` int32, kernel blocks.
    max_query_len : int
    """

    def __init__(
        self,
        inputs: StepInputs,
        group: AttentionInputs,
        kv: PagedKV,
        rows: slice,
        max_query_len: int,
    ) -> None:
        starts = inputs.query_start_loc[rows.start : rows.stop + 1]
        self.query_start_loc = starts - starts[0]
        self.seq_lens = inputs.seq_lens[rows]
        self.block_table = group.block_table[rows]
        self.max_query_len = max_query_len
        self._kv = kv

    @cached_property
    def plan(self) -> AttentionPlan:
        """How queries meet keys, for torch."""
        return plan_attention(self.query_start_loc, self.seq_lens, self.block_table, self._kv)


class AttentionStep:
    """A full-attention group: where K and V go, and which queries meet which keys.

    Attributes
    ----------
    num_decodes : int
        Leading rows, of one token each.
    slot_mapping : Tensor
        ``[T]`` int64.
    decodes, prefills : AttentionRows or None
        None if there is no such row.
    """

    def __init__(self, inputs: StepInputs, group: AttentionInputs, kv: PagedKV) -> None:
        count, end = group.num_decodes, inputs.num_reqs
        self.num_decodes = count
        self.slot_mapping = group.slot_mapping
        self.decodes = AttentionRows(inputs, group, kv, slice(0, count), 1) if count else None
        self.prefills = (
            AttentionRows(inputs, group, kv, slice(count, end), inputs.max_query_len)
            if count < end
            else None
        )
        self._kv = kv

    @cached_property
    def slots(self) -> SlotPlan:
        """Where K and V go, for torch."""
        return plan_slots(self.slot_mapping, self._kv)


class GdnPrefill:
    """The rows of a GDN group that take more than one token, or start.

    Attributes
    ----------
    query_start_loc : Tensor
        ``[R + 1]`` int32, of these rows alone.
    slots : Tensor
        ``[R]`` int64 state slots.
    """

    def __init__(
        self, query_start_loc: Tensor, slots: Tensor, states: GdnStates, width: int
    ) -> None:
        self.query_start_loc = query_start_loc
        self.slots = slots
        _, heads, value_dim, key_dim = states.ssm.shape
        self._elements = heads * (value_dim + key_dim)
        self._width = width
        self._recurrent: dict[int, Tensor | None] = {}
        self._chunks: dict[int, ChunkPlan | None] = {}

    @cached_property
    def has_initial_state(self) -> Tensor:
        """``[R]`` bool, all true: rows that start find zeros in their slots."""
        return torch.ones(len(self.slots), dtype=torch.bool, device=self.slots.device)

    @cached_property
    def convolution(self) -> ConvolutionPlan:
        """Where windows lie, for torch."""
        return plan_convolution(self.query_start_loc.long(), self._width)

    @cached_property
    def chunk_table(self) -> Tensor:
        """Where chunks lie, for the kernel."""
        return chunk_table(self.query_start_loc)

    def chunks(self, longer_than: int = 0) -> ChunkPlan | None:
        """Where chunks lie, for torch, in rows of more than so many tokens; None if none has."""
        if longer_than not in self._chunks:
            plan = plan_chunks(self.query_start_loc, self._elements, longer_than)
            self._chunks[longer_than] = plan if plan.batches else None
        return self._chunks[longer_than]

    def recurrent_slots(self, at_most: int) -> Tensor | None:
        """``[R, 1]`` slots of rows of at most so many tokens, 0 for the others; None if all are."""
        if at_most not in self._recurrent:
            short = self.query_start_loc.diff() <= at_most
            slots = self.slots.where(short, 0)[:, None] if bool(short.any()) else None
            self._recurrent[at_most] = slots
        return self._recurrent[at_most]


class GdnStep:
    """A GDN group; the tokens of decode rows come first.

    Attributes
    ----------
    num_decodes : int
        Rows, and tokens, that take the recurrent form.
    decode_slots : Tensor
        ``[num_decodes]`` int64 state slots.
    prefill : GdnPrefill or None
        None if there is no other row.
    """

    def __init__(self, inputs: StepInputs, group: GdnInputs, states: GdnStates, width: int) -> None:
        slots = group.state_indices.long()
        count = group.num_decodes
        self.num_decodes = count
        self.decode_slots = slots[:count]
        self.prefill = (
            GdnPrefill(inputs.query_start_loc[count:] - count, slots[count:], states, width)
            if count < inputs.num_reqs
            else None
        )

    @cached_property
    def decode_span(self) -> slice | None:
        """The slots of decode rows, if they are evenly spaced."""
        return evenly_spaced(self.decode_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step.

    Attributes
    ----------
    memory : CacheMemory
    cos_sin : Tensor
        ``[T, rotary_dim]`` float32, of the tokens' positions.
    attention, gdn : dict of int to AttentionStep and GdnStep
        By layer index.
    """

    memory: CacheMemory
    cos_sin: Tensor
    attention: dict[int, AttentionStep] = field(default_factory=dict)
    gdn: dict[int, GdnStep] = field(default_factory=dict)


def plan_step(inputs: StepInputs, memory: CacheMemory, cos_sin: Tensor) -> StepPlan:
    """Make the plans of all groups, and place the states that rows start from.

    Parameters
    ----------
    inputs : StepInputs
    memory : CacheMemory
        Slots of rows without an initial state become zero; in mode ``align`` states move on to
        the block that the step ends in.
    cos_sin : Tensor
        The rotary table.

    Returns
    -------
    StepPlan
    """
    plan = StepPlan(memory=memory, cos_sin=cos_sin.index_select(0, inputs.positions))
    for layers, attention in zip(memory.attention_layers, inputs.attention, strict=True):
        step = AttentionStep(inputs, attention, memory.kv(layers[0]))
        plan.attention.update(dict.fromkeys(layers, step))
    for layers, gdn in zip(memory.gdn_layers, inputs.gdn, strict=True):
        _place_states(gdn, memory, layers)
        width = memory.model.linear_conv_kernel_dim
        gdn_step = GdnStep(inputs, gdn, memory.gdn(layers[0]), width)
        plan.gdn.update(dict.fromkeys(layers, gdn_step))
    return plan


def _place_states(group: GdnInputs, memory: CacheMemory, layers: tuple[int, ...]) -> None:
    """Bring the states that rows start from into the slots that the step works on."""
    current, started = group.state_indices, group.has_initial_state
    fresh = current[~started].long()
    if len(fresh):
        memory.clear_states(layers, fresh)
    if group.previous_state_indices is not None:
        moved = started & (group.previous_state_indices != current)
        if bool(moved.any()):
            source = group.previous_state_indices[moved].long()
            memory.move_states(layers, source, current[moved].long())
