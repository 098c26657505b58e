"""What a model reads of a step: views of the batch's buffers, valid until the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from servespec.reference.contracts import AttentionState, GraphDispatch

__all__ = ["AttentionInputs", "GdnInputs", "GraphInputs", "StateMoves", "StepInputs"]


@dataclass(slots=True, kw_only=True)
class AttentionInputs:
    """One full-attention group; R rows, T tokens.

    Attributes
    ----------
    block_table : torch.Tensor
        ``[R, W]`` int32 kernel blocks; W is the longest table of the step, 0 fills shorter ones.
    slot_mapping : torch.Tensor
        ``[T]`` int64, where each token's K/V goes.
    num_decodes, num_prefills, num_decode_tokens : int
        The leading rows that count as decodes, the others, and the tokens of the former.
    attn_state : AttentionState
        The stored label.
    """

    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    attn_state: AttentionState


@dataclass(slots=True, kw_only=True)
class StateMoves:
    """Copies of states between blocks, M of them, in every layer of a GDN group.

    Attributes
    ----------
    rows : torch.Tensor
        ``[M]`` int64, the rows whose states move.
    ssm_sources, conv_sources, destinations : torch.Tensor
        ``[M]`` int64 blocks.
    conv_offsets : torch.Tensor
        ``[M]`` int64, where the convolution window starts in its source.
    """

    rows: Tensor
    ssm_sources: Tensor
    conv_sources: Tensor
    destinations: Tensor
    conv_offsets: Tensor


@dataclass(slots=True, kw_only=True)
class GdnInputs:
    """One GDN group; R rows, T tokens, of which N rows carry drafts.

    Attributes
    ----------
    state_indices : torch.Tensor
        ``[R]`` int32, the state block of each row.
    has_initial_state : torch.Tensor
        ``[R]`` bool for every row, decodes and rows with drafts too: whether the state was
        written by an earlier step of the same request. Where it is False the row starts from
        zeros, whatever its block holds.
    previous_state_indices : torch.Tensor or None
        In mode ``align``, ``[R]`` int32: the block in which earlier steps left each row's state,
        which moves to `state_indices` before the step runs. Without meaning where
        `has_initial_state` is False. None in mode ``none``, in which states stay where they are.
    moves : StateMoves or None
        The same moves as lists, with the offsets that accepted drafts give them.
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens : int
        Decodes are the leading rows; there are none if any row carries drafts.
    num_spec_decodes, num_spec_decode_tokens : int
        N and the tokens of those rows. The tensors below exist if N is positive.
    spec_sequence_masks : torch.Tensor or None
        ``[R]`` bool, rows that carry drafts.
    spec_state_indices : torch.Tensor or None
        ``[N, K + 1]`` int32.
    num_accepted_tokens : torch.Tensor or None
        ``[N]`` int32; the row's state is in column ``num_accepted_tokens - 1``.
    spec_query_start_loc, non_spec_query_start_loc : torch.Tensor or None
        ``[N + 1]`` and ``[R - N + 1]`` int32 cumulative tokens of both kinds of row.
    spec_token_index, non_spec_token_index : torch.Tensor or None
        int64 positions of the tokens of both kinds in the packed batch.
    initial_state_indices, row_num_accepted_tokens : torch.Tensor or None
        ``[R]`` int32, with speculation only: the block that a row without drafts reads its state
        from, and the accepted count behind it, which is one more than the offset of its
        convolution window. It writes to `state_indices`.
    """

    state_indices: Tensor
    has_initial_state: Tensor
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    previous_state_indices: Tensor | None = None
    moves: StateMoves | None = None
    num_spec_decodes: int = 0
    num_spec_decode_tokens: int = 0
    spec_sequence_masks: Tensor | None = None
    spec_state_indices: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    spec_query_start_loc: Tensor | None = None
    non_spec_query_start_loc: Tensor | None = None
    spec_token_index: Tensor | None = None
    non_spec_token_index: Tensor | None = None
    initial_state_indices: Tensor | None = None
    row_num_accepted_tokens: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class GraphInputs:
    """What a full graph reads: the same buffers, up to the padded rows and tokens.

    Attributes
    ----------
    num_reqs : int
        Rows with dummies, P.
    token_ids, positions : torch.Tensor
        ``[padded tokens]`` int64, 0 behind those of the step.
    query_start_loc, gdn_query_start_loc : torch.Tensor
        ``[P + 1]`` int32; dummies have tokens in the first only.
    seq_lens : torch.Tensor
        ``[P]`` int32, 0 for dummies, 1 for one beyond the most rows of a step.
    attention, gdn : list
        As in `StepInputs`, over P rows; slots of padding tokens are -1.
    """

    num_reqs: int
    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    gdn_query_start_loc: Tensor
    seq_lens: Tensor
    attention: list[AttentionInputs] = field(default_factory=list)
    gdn: list[GdnInputs] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step, laid out for a model; R rows, T tokens.

    Attributes
    ----------
    req_ids : list of str
        The request of each row.
    num_tokens, num_reqs : int
        T and R.
    max_query_len : int
        Most tokens of one row.
    token_ids, positions : torch.Tensor
        ``[T]`` int64.
    query_start_loc : torch.Tensor
        ``[R + 1]`` int32.
    seq_lens, num_computed_tokens, num_scheduled_tokens : torch.Tensor
        ``[R]`` int32.
    logits_indices : torch.Tensor
        int64: the last token of each row, and the last d + 1 of a row with d drafts.
    sampled : torch.Tensor
        ``[R]`` bool, rows whose token is kept.
    num_draft_tokens : torch.Tensor
        ``[R]`` int32.
    is_prefilling : torch.Tensor
        ``[R]`` bool, rows that had computed fewer tokens than their prompt has.
    attn_state : AttentionState
        The label the worker goes on with.
    swaps : list of (int, int)
        Row swaps of the reordering.
    attention : list of AttentionInputs
        One for each full-attention group, in group order.
    gdn : list of GdnInputs
        One for each GDN group, in group order.
    dispatch : GraphDispatch or None
        The graph of the step; None if the engine knows no graphs.
    graph : GraphInputs or None
        The padded views, if that is a full graph.
    """

    req_ids: list[str]
    num_tokens: int
    num_reqs: int
    max_query_len: int
    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    num_scheduled_tokens: Tensor
    logits_indices: Tensor
    sampled: Tensor
    num_draft_tokens: Tensor
    is_prefilling: Tensor
    attn_state: AttentionState
    swaps: list[tuple[int, int]]
    attention: list[AttentionInputs] = field(default_factory=list)
    gdn: list[GdnInputs] = field(default_factory=list)
    dispatch: GraphDispatch | None = None
    graph: GraphInputs | None = None
