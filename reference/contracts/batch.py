"""The batch a worker makes of a step: row order, inputs and metadata of both layer kinds.

Everything is a tuple of Python integers, so that records compare exactly and write to JSON as
they are; a fast implementation keeps tensors and makes these on demand.

Sources: ``vllm/v1/worker/gpu_input_batch.py`` and ``gpu_model_runner.py`` (rows, inputs),
``vllm_ascend/attention/attention_v1.py`` (states and attention metadata),
``vllm/v1/attention/backends/gdn_attn.py`` (GDN metadata).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servespec.reference.contracts.graph import GraphDispatch
from servespec.reference.contracts.scheduling import BlockTable

__all__ = ["AttentionMetadata", "AttentionState", "BatchRecord", "GdnMetadata", "StateMove"]


class AttentionState(Enum):
    """How the Ascend backend labels a whole step; all labels compute one equation."""

    PREFILL_NO_CACHE = "PrefillNoCache"
    PREFILL_CACHE_HIT = "PrefillCacheHit"
    DECODE_ONLY = "DecodeOnly"
    CHUNKED_PREFILL = "ChunkedPrefill"
    SPEC_DECODING = "SpecDecoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What a full-attention layer needs; R rows, T tokens.

    Attributes
    ----------
    num_actual_tokens : int
        T, without padding.
    num_decodes, num_prefills : int
        Rows before and after the boundary, dummy rows included.
    num_decode_tokens : int
        Tokens of the rows before the boundary.
    query_start_loc : tuple of int
        R + 1 cumulative token counts, 0 first.
    actual_seq_lengths_q : tuple of int
        ``query_start_loc[1:]``.
    seq_lens : tuple of int
        R values: tokens computed before the step plus those scheduled, per row.
    max_query_len : int
        Most tokens of one row.
    block_tables : tuple of tuple of int
        R rows of kernel block ids, padded with 0 to one width.
    slot_mapping : tuple of int
        T values: where each token's K/V goes, ``block * kernel block size + offset``.
    attn_state : AttentionState
        The stored label.
    causal : bool
    """

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    query_start_loc: tuple[int, ...]
    actual_seq_lengths_q: tuple[int, ...]
    seq_lens: tuple[int, ...]
    max_query_len: int
    block_tables: tuple[tuple[int, ...], ...]
    slot_mapping: tuple[int, ...]
    attn_state: AttentionState
    causal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnMetadata:
    """What a GDN layer needs; fields that a batch without (or with only) drafts lacks are None.

    Attributes
    ----------
    num_prefills, num_prefill_tokens : int
        Rows and tokens that go through the chunked form.
    num_decodes, num_decode_tokens : int
        Rows and tokens that go through the recurrent form.
    num_spec_decodes, num_spec_decode_tokens : int
        Rows and tokens with drafts.
    num_actual_tokens : int
    has_initial_state : tuple of bool or None
        For each row without drafts: whether its state was written by an earlier step of the same
        request. None if there is no prefill row.
    spec_query_start_loc, non_spec_query_start_loc : tuple of int or None
        Cumulative token counts of the rows with and without drafts.
    spec_state_indices : tuple of tuple of int or None
        For each row with drafts, its K + 1 state blocks.
    non_spec_state_indices : tuple of int or None
        For each row without drafts, its state block.
    spec_sequence_masks : tuple of bool or None
        For each row of the batch, whether it carries drafts.
    spec_token_index, non_spec_token_index : tuple of int or None
        Positions of the tokens of both kinds in the packed batch.
    num_accepted_tokens : tuple of int or None
        For each row with drafts, tokens the previous step kept; selects the state column.
    non_spec_num_accepted_tokens : tuple of int or None
        The same for each row without drafts, None without speculation. Such a row reads its
        convolution window at that offset and its state from that column, and writes its first
        column.
    non_spec_initial_state_indices : tuple of int or None
        For each row without drafts, the block its state is read from; None without speculation,
        where it is the one it is written to.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: tuple[bool, ...] | None = None
    spec_query_start_loc: tuple[int, ...] | None = None
    non_spec_query_start_loc: tuple[int, ...] | None = None
    spec_state_indices: tuple[tuple[int, ...], ...] | None = None
    non_spec_state_indices: tuple[int, ...] | None = None
    spec_sequence_masks: tuple[bool, ...] | None = None
    spec_token_index: tuple[int, ...] | None = None
    non_spec_token_index: tuple[int, ...] | None = None
    num_accepted_tokens: tuple[int, ...] | None = None
    non_spec_num_accepted_tokens: tuple[int, ...] | None = None
    non_spec_initial_state_indices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """Copy the state of one request to another block, in every layer of a GDN group.

    Attributes
    ----------
    req_id : str
    ssm_src_block_id : int
        Block whose recurrent state is copied.
    conv_src_block_id, conv_offset : int
        Block whose convolution window is copied, and the position of the window in it.
    dst_block_id : int
        Block that both go to, the window to position 0.
    """

    req_id: str
    ssm_src_block_id: int
    conv_src_block_id: int
    conv_offset: int
    dst_block_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One step as the worker sees it; R rows, T tokens.

    Attributes
    ----------
    req_ids : tuple of str
        The request of each row, after condensing and reordering.
    swaps : tuple of (int, int)
        Row swaps of the reordering, in order.
    num_scheduled_tokens, num_computed_tokens : tuple of int
        For each row; computed tokens are those before this step.
    token_ids, positions : tuple of int
        T input tokens and their positions.
    query_start_loc : tuple of int
        R + 1 cumulative token counts.
    seq_lens : tuple of int
        For each row, computed plus scheduled tokens.
    block_tables : tuple of tuple of tuple of int
        For each row, its block table (a tuple for each group).
    logits_indices : tuple of int
        Tokens whose logits are computed: the last of each row, and of a row with d drafts the
        last d + 1.
    sampled : tuple of bool
        For each row, whether its token is kept (a row whose ``seq_len`` is short of the known
        tokens is computed and thrown away).
    attn_state : AttentionState
        The label the cascade returned; the one in the metadata can differ under speculation.
    attention : tuple of AttentionMetadata
        One for each full-attention group, in group order.
    gdn : tuple of GdnMetadata
        One for each GDN group, in group order.
    num_draft_tokens : tuple of int
        For each row, draft tokens among its scheduled ones; empty in a step without drafts.
    is_prefilling : tuple of bool
        For each row, whether it had computed fewer tokens than its prompt has.
    graph : GraphDispatch or None
        The graph the step runs in; None if the engine knows no graphs. In a full graph the
        metadata hold dummy rows behind those of the batch; nothing else of the record does.
    state_moves : tuple of tuple of StateMove
        For each GDN group, the moves to make before the step runs; empty without aligned states.
    """

    req_ids: tuple[str, ...]
    swaps: tuple[tuple[int, int], ...]
    num_scheduled_tokens: tuple[int, ...]
    num_computed_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: tuple[BlockTable, ...]
    logits_indices: tuple[int, ...]
    sampled: tuple[bool, ...]
    attn_state: AttentionState
    attention: tuple[AttentionMetadata, ...]
    gdn: tuple[GdnMetadata, ...]
    num_draft_tokens: tuple[int, ...] = ()
    is_prefilling: tuple[bool, ...] = ()
    graph: GraphDispatch | None = None
    state_moves: tuple[tuple[StateMove, ...], ...] = ()
