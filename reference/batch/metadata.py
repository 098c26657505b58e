"""What a full-attention layer is told of a step.

Source: ``AscendAttentionMetadataBuilder`` of ``vllm_ascend/attention/attention_v1.py`` and
``split_decodes_and_prefills`` of ``vllm/v1/attention/backends/utils.py``. The builder only finds
the boundary of a batch that is in region order already; it moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from servespec.reference.contracts import AttentionMetadata, AttentionState

__all__ = ["Split", "attention_metadata", "cumulative", "split_decodes_and_prefills"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows and tokens before and after the boundary between decodes and prefills."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def cumulative(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return 0 followed by the running sums.

    Parameters
    ----------
    lengths : sequence of int

    Returns
    -------
    tuple of int
    """
    return tuple(accumulate(lengths, initial=0))


def split_decodes_and_prefills(
    query_lens: Sequence[int],
    is_prefilling: Sequence[bool],
    decode_threshold: int,
    short_extends_are_decodes: bool = True,
) -> Split:
    """Find the first row that is no decode; it and everything behind it are prefills.

    A row is no decode if it has more than `decode_threshold` tokens or, where short extends do
    not count as decodes, if it is still inside its prompt. Attention counts short extends as
    decodes and GDN layers do not, so in one step the two kinds of layer may rightly differ.

    Parameters
    ----------
    query_lens : sequence of int
        Tokens of each row.
    is_prefilling : sequence of bool
        For each row, whether computed tokens are fewer than the prompt's.
    decode_threshold : int
    short_extends_are_decodes : bool

    Returns
    -------
    Split
    """
    boundary = next(
        (
            row
            for row, (length, prefilling) in enumerate(zip(query_lens, is_prefilling, strict=True))
            if length > decode_threshold or (prefilling and not short_extends_are_decodes)
        ),
        len(query_lens),
    )
    return Split(
        num_decodes=boundary,
        num_prefills=len(query_lens) - boundary,
        num_decode_tokens=sum(query_lens[:boundary]),
        num_prefill_tokens=sum(query_lens[boundary:]),
    )


def attention_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    slot_mapping: Sequence[int],
    num_spec: int,
    attn_state: AttentionState,
    num_actual_tokens: int | None = None,
) -> AttentionMetadata:
    """Build the metadata of one full-attention group.

    Parameters
    ----------
    query_lens, seq_lens : sequence of int
        For each row, dummy rows included.
    block_tables : sequence of sequence of int
        Kernel blocks of each row, all rows of one width.
    slot_mapping : sequence of int
        At least one slot a token; what stands behind the last token is cut off.
    num_spec : int
        Most drafts of a row; a decode has up to one token more.
    attn_state : AttentionState
        The stored label.
    num_actual_tokens : int or None
        Tokens without padding; None means those of all rows.

    Returns
    -------
    AttentionMetadata
    """
    split = split_decodes_and_prefills(query_lens, (False,) * len(query_lens), 1 + num_spec)
    query_start_loc = cumulative(query_lens)
    tokens = query_start_loc[-1] if num_actual_tokens is None else num_actual_tokens
    return AttentionMetadata(
        num_actual_tokens=tokens,
        num_decodes=split.num_decodes,
        num_prefills=split.num_prefills,
        num_decode_tokens=tokens if split.num_prefills == 0 else split.num_decode_tokens,
        query_start_loc=query_start_loc,
        actual_seq_lengths_q=query_start_loc[1:],
        seq_lens=tuple(seq_lens),
        max_query_len=max(query_lens, default=0),
        block_tables=tuple(tuple(row) for row in block_tables),
        slot_mapping=tuple(slot_mapping[:tokens]),
        attn_state=attn_state,
    )
