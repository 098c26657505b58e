"""A prepared step as the contract's tuples, for a check to compare."""

from __future__ import annotations

import torch
from torch import Tensor

from servespec.fast.batch.inputs import AttentionInputs, GdnInputs, StateMoves, StepInputs
from servespec.reference.contracts import (
    AttentionMetadata,
    BatchRecord,
    BlockTable,
    GdnMetadata,
    StateMove,
)

__all__ = ["moves_of", "record_of"]


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
    starts, seq_lens = _tuple(step.query_start_loc), _tuple(step.seq_lens)
    padded = step.graph
    if padded is None:
        attention = tuple(_attention(step, inputs, starts, seq_lens) for inputs in step.attention)
        gdn = tuple(_gdn(step, inputs, starts) for inputs in step.gdn)
    else:
        rows, lens = _tuple(padded.query_start_loc), _tuple(padded.seq_lens)
        attention = tuple(_attention(step, inputs, rows, lens) for inputs in padded.attention)
        rows = _tuple(padded.gdn_query_start_loc)
        gdn = tuple(_gdn(step, inputs, rows) for inputs in padded.gdn)
    return BatchRecord(
        req_ids=tuple(step.req_ids),
        swaps=tuple(step.swaps),
        num_scheduled_tokens=_tuple(step.num_scheduled_tokens),
        num_computed_tokens=_tuple(step.num_computed_tokens),
        token_ids=_tuple(step.token_ids),
        positions=_tuple(step.positions),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        logits_indices=_tuple(step.logits_indices),
        sampled=tuple(step.sampled.tolist()),
        attn_state=step.attn_state,
        attention=attention,
        gdn=gdn,
        num_draft_tokens=drafts if any(drafts) else (),
        is_prefilling=tuple(step.is_prefilling.tolist()),
        graph=step.dispatch,
        state_moves=tuple(
            moves_of(step.req_ids, inputs.moves) for inputs in step.gdn if inputs.moves is not None
        ),
    )


def moves_of(req_ids: list[str], moves: StateMoves) -> tuple[StateMove, ...]:
    """Return state moves as a contract.

    Parameters
    ----------
    req_ids : list of str
        The request of each row.
    moves : StateMoves

    Returns
    -------
    tuple of StateMove
    """
    columns = (
        moves.rows,
        moves.ssm_sources,
        moves.conv_sources,
        moves.conv_offsets,
        moves.destinations,
    )
    return tuple(
        StateMove(
            req_id=req_ids[row],
            ssm_src_block_id=ssm,
            conv_src_block_id=conv,
            conv_offset=offset,
            dst_block_id=destination,
        )
        for row, ssm, conv, offset, destination in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


def _attention(
    step: StepInputs,
    inputs: AttentionInputs,
    starts: tuple[int, ...],
    seq_lens: tuple[int, ...],
) -> AttentionMetadata:
    return AttentionMetadata(
        num_actual_tokens=step.num_tokens,
        num_decodes=inputs.num_decodes,
        num_prefills=inputs.num_prefills,
        num_decode_tokens=inputs.num_decode_tokens,
        query_start_loc=starts,
        actual_seq_lengths_q=starts[1:],
        seq_lens=seq_lens,
        max_query_len=step.max_query_len,
        block_tables=tuple(map(tuple, inputs.block_table.tolist())),
        slot_mapping=_tuple(inputs.slot_mapping[: step.num_tokens]),
        attn_state=inputs.attn_state,
    )


def _gdn(step: StepInputs, inputs: GdnInputs, starts: tuple[int, ...]) -> GdnMetadata:
    """Keep of each column the rows without drafts; a step of drafts alone has none."""
    mask = inputs.spec_sequence_masks
    others = torch.ones_like(inputs.has_initial_state) if mask is None else ~mask
    if inputs.non_spec_query_start_loc is not None:
        starts = _tuple(inputs.non_spec_query_start_loc)
    has_others = inputs.num_spec_decodes == 0 or inputs.num_prefills > 0

    def of_others(values: Tensor | None) -> tuple[int, ...] | None:
        return None if values is None or not has_others else _tuple(values[others])

    initial = inputs.has_initial_state[others]
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
        non_spec_query_start_loc=starts if has_others else None,
        spec_state_indices=(
            None
            if inputs.spec_state_indices is None
            else tuple(map(tuple, inputs.spec_state_indices.tolist()))
        ),
        non_spec_state_indices=of_others(inputs.state_indices),
        spec_sequence_masks=None if mask is None else tuple(mask.tolist()),
        spec_token_index=_optional(inputs.spec_token_index),
        non_spec_token_index=_optional(inputs.non_spec_token_index),
        num_accepted_tokens=_optional(inputs.num_accepted_tokens),
        non_spec_num_accepted_tokens=of_others(inputs.row_num_accepted_tokens),
        non_spec_initial_state_indices=of_others(inputs.initial_state_indices),
    )


def _tuple(values: Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())


def _optional(values: Tensor | None) -> tuple[int, ...] | None:
    return None if values is None else _tuple(values)
