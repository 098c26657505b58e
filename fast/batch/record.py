"""A prepared step as the contract's tuples, for a check to compare."""

from __future__ import annotations

from torch import Tensor

from servespec.fast.batch.inputs import AttentionInputs, GdnInputs, StepInputs
from servespec.reference.contracts import (
    AttentionMetadata,
    BatchRecord,
    BlockTable,
    GdnMetadata,
)

__all__ = ["record_of"]


def record_of(step: StepInputs, block_tables: tuple[BlockTable, ...]) -> BatchRecord:
    """Return the record of a step.

    Parameters
    ----------
    step : StepInputs
    block_tables : tuple of tuple of tuple of int
        Pool blocks of each row, a tuple for each group.

    Returns
    -------
    BatchRecord
    """
    drafts = _tuple(step.num_draft_tokens)
    return BatchRecord(
        req_ids=tuple(step.req_ids),
        swaps=tuple(step.swaps),
        num_scheduled_tokens=_tuple(step.num_scheduled_tokens),
        num_computed_tokens=_tuple(step.num_computed_tokens),
        token_ids=_tuple(step.token_ids),
        positions=_tuple(step.positions),
        query_start_loc=_tuple(step.query_start_loc),
        seq_lens=_tuple(step.seq_lens),
        block_tables=block_tables,
        logits_indices=_tuple(step.logits_indices),
        sampled=tuple(step.sampled.tolist()),
        attn_state=step.attn_state,
        attention=tuple(_attention(step, inputs) for inputs in step.attention),
        gdn=tuple(_gdn(step, inputs) for inputs in step.gdn),
        num_draft_tokens=drafts if any(drafts) else (),
    )


def _attention(step: StepInputs, inputs: AttentionInputs) -> AttentionMetadata:
    starts = _tuple(step.query_start_loc)
    return AttentionMetadata(
        num_actual_tokens=step.num_tokens,
        num_decodes=inputs.num_decodes,
        num_prefills=inputs.num_prefills,
        num_decode_tokens=inputs.num_decode_tokens,
        query_start_loc=starts,
        actual_seq_lengths_q=starts[1:],
        seq_lens=_tuple(step.seq_lens),
        max_query_len=step.max_query_len,
        block_tables=tuple(map(tuple, inputs.block_table.tolist())),
        slot_mapping=_tuple(inputs.slot_mapping),
        attn_state=inputs.attn_state,
    )


def _gdn(step: StepInputs, inputs: GdnInputs) -> GdnMetadata:
    states, initial = inputs.state_indices, inputs.has_initial_state
    starts: Tensor | None = step.query_start_loc
    if inputs.spec_sequence_masks is not None:
        others = ~inputs.spec_sequence_masks
        states, initial, starts = states[others], initial[others], inputs.non_spec_query_start_loc
    only_drafts = inputs.num_spec_decodes > 0 and inputs.num_prefills == 0
    return GdnMetadata(
        num_prefills=inputs.num_prefills,
        num_prefill_tokens=inputs.num_prefill_tokens,
        num_decodes=inputs.num_decodes,
        num_decode_tokens=inputs.num_decode_tokens,
        num_spec_decodes=inputs.num_spec_decodes,
        num_spec_decode_tokens=inputs.num_spec_decode_tokens,
        num_actual_tokens=step.num_tokens,
        has_initial_state=tuple(initial.tolist()) if inputs.num_prefills else None,
        spec_query_start_loc=_optional(inputs.spec_query_start_loc),
        non_spec_query_start_loc=None if only_drafts else _optional(starts),
        spec_state_indices=(
            None
            if inputs.spec_state_indices is None
            else tuple(map(tuple, inputs.spec_state_indices.tolist()))
        ),
        non_spec_state_indices=None if only_drafts else _tuple(states),
        spec_sequence_masks=(
            None
            if inputs.spec_sequence_masks is None
            else tuple(inputs.spec_sequence_masks.tolist())
        ),
        spec_token_index=_optional(inputs.spec_token_index),
        non_spec_token_index=_optional(inputs.non_spec_token_index),
        num_accepted_tokens=_optional(inputs.num_accepted_tokens),
    )


def _tuple(values: Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())


def _optional(values: Tensor | None) -> tuple[int, ...] | None:
    return None if values is None else _tuple(values)
