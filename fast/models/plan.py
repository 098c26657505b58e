"""What the layers of a step share: made once, used by every layer of a group."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from servespec.fast.batch.inputs import AttentionInputs, GdnInputs, StepInputs
from servespec.fast.cache.memory import CacheMemory
from servespec.fast.kernels.attention import AttentionPlan, plan_attention
from servespec.fast.kernels.chunk_gated_delta_rule import ChunkPlan, plan_chunks
from servespec.fast.kernels.convolution import ConvolutionPlan, plan_convolution
from servespec.fast.kernels.gated_delta_rule import evenly_spaced
from servespec.fast.kernels.kv_cache import SlotPlan, plan_slots

__all__ = ["AttentionStep", "GdnStep", "StepPlan", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """A full-attention group: where K and V go, and which queries meet which keys."""

    slots: SlotPlan
    attention: AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnStep:
    """A GDN group; the tokens of decode rows come first.

    Attributes
    ----------
    num_decodes : int
        Rows, and tokens, that take the recurrent form.
    decode_slots, prefill_slots : Tensor
        int64 state slots of both kinds of row.
    decode_span : slice or None
        The slots of decode rows, if they are evenly spaced.
    convolution, chunks : ConvolutionPlan and ChunkPlan, or None
        None if there is no prefill row.
    """

    num_decodes: int
    decode_slots: Tensor
    prefill_slots: Tensor
    decode_span: slice | None
    convolution: ConvolutionPlan | None = None
    chunks: ChunkPlan | None = None


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
        plan.attention.update(dict.fromkeys(layers, _attention(inputs, attention, memory, layers)))
    for layers, gdn in zip(memory.gdn_layers, inputs.gdn, strict=True):
        _place_states(gdn, memory, layers)
        plan.gdn.update(dict.fromkeys(layers, _gdn(inputs, gdn, memory, layers)))
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


def _attention(
    inputs: StepInputs, group: AttentionInputs, memory: CacheMemory, layers: tuple[int, ...]
) -> AttentionStep:
    kv = memory.kv(layers[0])
    return AttentionStep(
        slots=plan_slots(group.slot_mapping, kv),
        attention=plan_attention(inputs.query_start_loc, inputs.seq_lens, group.block_table, kv),
    )


def _gdn(
    inputs: StepInputs, group: GdnInputs, memory: CacheMemory, layers: tuple[int, ...]
) -> GdnStep:
    ssm = memory.gdn(layers[0]).ssm
    _, heads, value_dim, key_dim = ssm.shape
    slots = group.state_indices.long()
    count = group.num_decodes
    convolution = chunks = None
    if count < inputs.num_reqs:
        starts = (inputs.query_start_loc[count:] - count).long()
        convolution = plan_convolution(starts, memory.model.linear_conv_kernel_dim)
        chunks = plan_chunks(starts, heads * (value_dim + key_dim))
    return GdnStep(
        num_decodes=count,
        decode_slots=slots[:count],
        prefill_slots=slots[count:],
        decode_span=evenly_spaced(slots[:count]),
        convolution=convolution,
        chunks=chunks,
    )
