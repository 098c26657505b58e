"""What a GDN layer is told of a step.

Without drafts the batch has a leading slice of decodes, which go through the recurrent form, and
prefills behind it, which go through the chunked form. With drafts in the batch its rows are told
apart by a mask instead, and every row without drafts goes through the chunked form, a lone decode
too.

State blocks are not cleared when they are given out. What keeps a request from reading what its
block held before is `has_initial_state`, and that exists for prefill rows only. So a row whose
request has computed nothing yet must never count as a decode: one-token rows inside their prompt
are prefills here, as the Ascend backend has it. vLLM 0.27.1 counts them as decodes, which is the
quirk `gdn_fresh_decode`. A row with drafts can be fresh as well (a one-token prompt admitted
together with draft padding); the metadata has no flag for it, and an engine must start such a row
from zeros whenever `BatchRecord.num_computed_tokens` is 0 for it.

Source: ``GDNAttentionMetadataBuilder`` of ``vllm/v1/attention/backends/gdn_attn.py`` and its
counterpart in vllm-ascend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from servespec.reference.batch.metadata import cumulative, split_decodes_and_prefills
from servespec.reference.contracts import GdnMetadata, Quirks

__all__ = ["decode_draft_counts", "gdn_metadata"]


def decode_draft_counts(
    num_scheduled_tokens: Sequence[int], num_draft_tokens: Sequence[int]
) -> tuple[int, ...]:
    """Return the drafts of each verification row and -1 for every other row.

    A row verifies drafts if it holds one token and its drafts and nothing else.

    Parameters
    ----------
    num_scheduled_tokens, num_draft_tokens : sequence of int

    Returns
    -------
    tuple of int
    """
    return tuple(
        drafts if drafts > 0 and scheduled == drafts + 1 else -1
        for scheduled, drafts in zip(num_scheduled_tokens, num_draft_tokens, strict=True)
    )


def gdn_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prompt_lens: Sequence[int],
    state_blocks: Sequence[Sequence[int]],
    decode_drafts: Sequence[int] | None = None,
    num_accepted: Sequence[int] | None = None,
    quirks: Quirks | None = None,
) -> GdnMetadata:
    """Build the metadata of one GDN group.

    A dummy row of a padded step is a row of no tokens and null blocks: query, sequence and prompt
    lengths 0, drafts -1, accepted 1.

    Parameters
    ----------
    query_lens, seq_lens, prompt_lens : sequence of int
        For each row: tokens of the step, computed tokens after it, tokens of the prompt.
    state_blocks : sequence of sequence of int
        For each row its ``1 + num_spec`` state blocks (`block_tables.state_columns`).
    decode_drafts : sequence of int or None
        `decode_draft_counts`; None if no row of the step has drafts.
    num_accepted : sequence of int or None
        Tokens the previous step sampled for each row; None without speculation.
    quirks : Quirks or None
        None means none of them.

    Returns
    -------
    GdnMetadata
    """
    if decode_drafts is not None and any(drafts > 0 for drafts in decode_drafts):
        if num_accepted is None:
            raise ValueError("num_accepted is None: rows with drafts need their accepted counts")
        metadata = _with_drafts(query_lens, seq_lens, state_blocks, decode_drafts, num_accepted)
    else:
        fresh_decode = quirks is not None and quirks.gdn_fresh_decode
        metadata = _without_drafts(query_lens, seq_lens, prompt_lens, state_blocks, fresh_decode)
    if num_accepted is None or (quirks is not None and quirks.gdn_ignores_accepted):
        return metadata
    return _with_initial_columns(metadata, state_blocks, num_accepted)


def _without_drafts(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prompt_lens: Sequence[int],
    state_blocks: Sequence[Sequence[int]],
    fresh_decode: bool,
) -> GdnMetadata:
    """Build the metadata of a batch without drafts."""
    context = tuple(seq - query for seq, query in zip(seq_lens, query_lens, strict=True))
    split = split_decodes_and_prefills(
        query_lens,
        tuple(done < prompt for done, prompt in zip(context, prompt_lens, strict=True)),
        decode_threshold=1,
        short_extends_are_decodes=fresh_decode,
    )
    return GdnMetadata(
        num_prefills=split.num_prefills,
        num_prefill_tokens=split.num_prefill_tokens,
        num_decodes=split.num_decodes,
        num_decode_tokens=split.num_decode_tokens,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=sum(query_lens),
        has_initial_state=tuple(done > 0 for done in context) if split.num_prefills else None,
        non_spec_query_start_loc=cumulative(query_lens),
        non_spec_state_indices=tuple(blocks[0] for blocks in state_blocks),
    )


def _with_drafts(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    state_blocks: Sequence[Sequence[int]],
    decode_drafts: Sequence[int],
    num_accepted: Sequence[int],
) -> GdnMetadata:
    """Build the metadata of a batch in which some row verifies drafts.

    If nothing but such rows has tokens, dummy rows stay at the end of their arrays: a full graph
    was captured for them too.
    """
    mask = tuple(drafts >= 0 for drafts in decode_drafts)
    spec = [row for row, is_spec in enumerate(mask) if is_spec]
    rest = [row for row, is_spec in enumerate(mask) if not is_spec]
    starts = cumulative(query_lens)
    rest_lens = [query_lens[row] for row in rest]
    num_prefills = sum(1 for length in rest_lens if length > 0)
    has_rest = num_prefills > 0
    listed = spec if has_rest else [*spec, *rest]
    return GdnMetadata(
        num_prefills=num_prefills,
        num_prefill_tokens=sum(rest_lens),
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=len(spec),
        num_spec_decode_tokens=sum(query_lens[row] for row in spec),
        num_actual_tokens=sum(query_lens),
        has_initial_state=(
            tuple(seq_lens[row] > query_lens[row] for row in rest) if has_rest else None
        ),
        spec_query_start_loc=cumulative([query_lens[row] for row in listed]),
        non_spec_query_start_loc=cumulative(rest_lens) if has_rest else None,
        spec_state_indices=tuple(tuple(state_blocks[row]) for row in listed),
        non_spec_state_indices=(tuple(state_blocks[row][0] for row in rest) if has_rest else None),
        spec_sequence_masks=mask,
        spec_token_index=tuple(t for row in spec for t in range(starts[row], starts[row + 1])),
        non_spec_token_index=tuple(t for row in rest for t in range(starts[row], starts[row + 1])),
        num_accepted_tokens=tuple(num_accepted[row] for row in listed),
    )


def _with_initial_columns(
    metadata: GdnMetadata, state_blocks: Sequence[Sequence[int]], num_accepted: Sequence[int]
) -> GdnMetadata:
    """Say where rows without drafts find the state that a step with drafts left.

    Verification writes the state after its token t to column t and keeps them all, so what counts
    afterwards is column ``accepted - 1``, whether or not the next step has drafts.
    """
    if metadata.non_spec_state_indices is None:
        return metadata
    mask = metadata.spec_sequence_masks or (False,) * len(state_blocks)
    rest = [row for row, is_spec in enumerate(mask) if not is_spec]
    return replace(
        metadata,
        non_spec_num_accepted_tokens=tuple(num_accepted[row] for row in rest),
        non_spec_initial_state_indices=tuple(
            state_blocks[row][num_accepted[row] - 1] for row in rest
        ),
    )
