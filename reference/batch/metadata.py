"""What a full-attention layer is told of a step.

Source: ``AscendAttentionMetadataBuilder`` of ``vllm_ascend/attention/attention_v1.py`` and
``split_decodes_and_prefills`` of ``vllm/v1/attention/backends/utils.py``. The builder only finds
the boundary of a batch that is in region order already; it moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    slot_mapping: Sequence[int],
    num_spec: int,
    attn_state: AttentionState,
    padded_query_start_loc: Sequence[int] | None = None,
    max_num_seqs: int | None = None,
) -> AttentionMetadata:
    """Build the metadata of one full-attention group.

    Dummy rows of a padded step count as decodes if there is no prefill, else as prefills. Their
    tables are null blocks. Their sequence lengths are the zeros behind the live rows of a buffer
    of `max_num_seqs` entries; a dummy that the buffer has no room for gets 1. Nothing of a dummy
    row is kept: its tokens lie behind `num_actual_tokens`.

    Parameters
    ----------
    query_start_loc : sequence of int
        R + 1 cumulative token counts.
    seq_lens : sequence of int
        R values.
    block_tables : sequence of sequence of int
        Kernel blocks of each row, all rows of one width.
    slot_mapping : sequence of int
        At least one slot a token; what stands behind the last token is cut off.
    num_spec : int
        Most drafts of a row; a decode has up to one token more.
    attn_state : AttentionState
        The stored label.
    padded_query_start_loc : sequence of int or None
        The same counts with dummy rows (`padding.pad_query_start_loc`).
    max_num_seqs : int or None
        Most rows of a step; needed with dummy rows.

    Returns
    -------
    AttentionMetadata
    """
    num_tokens, num_reqs = query_start_loc[-1], len(seq_lens)
    query_lens = [end - start for start, end in pairwise(query_start_loc)]
    split = split_decodes_and_prefills(query_lens, (False,) * num_reqs, 1 + num_spec)
    padded = tuple(query_start_loc if padded_query_start_loc is None else padded_query_start_loc)
    rows = range(num_reqs, len(padded) - 1)
    room = num_reqs if max_num_seqs is None else max_num_seqs
    width = len(block_tables[0]) if block_tables else 0
    return AttentionMetadata(
        num_actual_tokens=num_tokens,
        num_decodes=split.num_decodes + (0 if split.num_prefills else len(rows)),
        num_prefills=split.num_prefills + (len(rows) if split.num_prefills else 0),
        num_decode_tokens=split.num_decode_tokens,
        query_start_loc=padded,
        actual_seq_lengths_q=padded[1:],
        seq_lens=(*seq_lens, *(0 if row < room else 1 for row in rows)),
        max_query_len=max(query_lens, default=0),
        block_tables=(*(tuple(row) for row in block_tables), *((0,) * width for _ in rows)),
        slot_mapping=tuple(slot_mapping[:num_tokens]),
        attn_state=attn_state,
    )
