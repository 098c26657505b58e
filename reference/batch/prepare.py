"""One plan in, one batch out: rows, inputs and the metadata of both layer kinds.

Source: ``_prepare_inputs`` and ``_build_attention_metadata`` of
``vllm/v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from servespec.reference.batch.attention_state import classify
from servespec.reference.batch.block_tables import kernel_blocks, pad_table, slot, state_columns
from servespec.reference.batch.gdn_metadata import decode_draft_counts, gdn_metadata
from servespec.reference.batch.metadata import attention_metadata, cumulative
from servespec.reference.batch.persistent import InputBatch, RequestState, update_states
from servespec.reference.batch.reorder import (
    apply_swaps,
    region,
    reorder_threshold,
    swaps_into_regions,
)
from servespec.reference.contracts import (
    AttentionMetadata,
    AttentionState,
    BatchRecord,
    CacheConfig,
    EngineConfig,
    GdnMetadata,
    RequestError,
    SchedulerOutput,
)

__all__ = ["prepare"]


def prepare(
    batch: InputBatch, output: SchedulerOutput, config: EngineConfig
) -> tuple[InputBatch, BatchRecord]:
    """Bring the batch up to a plan and lay out the step.

    Parameters
    ----------
    batch : InputBatch
    output : SchedulerOutput
        A plan without tokens gives a record without rows.
    config : EngineConfig

    Returns
    -------
    batch : InputBatch
        With the rows in the order of the step.
    record : BatchRecord

    Raises
    ------
    UnknownRequestError
        The plan names a request that this worker has never seen.
    RequestError
        The plan schedules tokens beyond those known, or more than the blocks can hold.
    """
    batch = update_states(batch, output)
    threshold = reorder_threshold(config.speculative)
    swaps = swaps_into_regions(
        [
            region(
                row.num_computed_tokens,
                output.num_scheduled_tokens[row.req_id],
                row.num_prompt_tokens,
                threshold,
            )
            for row in batch.rows
        ]
    )
    batch = replace(batch, req_ids=apply_swaps(batch.req_ids, swaps))
    rows = batch.rows
    scheduled = tuple(output.num_scheduled_tokens[req_id] for req_id in batch.req_ids)
    for row, count in zip(rows, scheduled, strict=True):
        _check_tokens(row, count)

    computed = tuple(row.num_computed_tokens for row in rows)
    seq_lens = tuple(done + count for done, count in zip(computed, scheduled, strict=True))
    drafts = tuple(len(row.draft_token_ids) for row in rows)
    starts = cumulative(scheduled)
    states = classify(
        computed,
        scheduled,
        drafts,
        None if config.speculative is None else config.speculative.method,
        config.scheduler.enable_chunked_prefill,
    )
    attention, gdn = _metadata_of_groups(rows, scheduled, seq_lens, states.stored, config)
    record = BatchRecord(
        req_ids=batch.req_ids,
        swaps=swaps,
        num_scheduled_tokens=scheduled,
        num_computed_tokens=computed,
        token_ids=tuple(
            token
            for row, end in zip(rows, seq_lens, strict=True)
            for token in (row.token_ids + row.draft_token_ids)[row.num_computed_tokens : end]
        ),
        positions=tuple(
            position
            for start, end in zip(computed, seq_lens, strict=True)
            for position in range(start, end)
        ),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=tuple(row.block_ids for row in rows),
        logits_indices=tuple(
            token
            for end, count in zip(starts[1:], drafts, strict=True)
            for token in range(end - 1 - count, end)
        ),
        sampled=tuple(end >= row.num_tokens for row, end in zip(rows, seq_lens, strict=True)),
        attn_state=states.returned,
        attention=attention,
        gdn=gdn,
        num_draft_tokens=drafts if any(drafts) else (),
    )
    return batch, record


def _check_tokens(row: RequestState, num_scheduled: int) -> None:
    known = row.num_tokens + len(row.draft_token_ids)
    end = row.num_computed_tokens + num_scheduled
    if not 1 + len(row.draft_token_ids) <= num_scheduled or end > known:
        raise RequestError(
            f"request {row.req_id!r}: {num_scheduled} tokens scheduled after "
            f"{row.num_computed_tokens} computed ones: must be at least 1 and the "
            f"{len(row.draft_token_ids)} drafts, and end within the {known} known ones"
        )


def _metadata_of_groups(
    rows: Sequence[RequestState],
    scheduled: Sequence[int],
    seq_lens: Sequence[int],
    stored_state: AttentionState,
    config: EngineConfig,
) -> tuple[tuple[AttentionMetadata, ...], tuple[GdnMetadata, ...]]:
    """Build the metadata of every group, those of one kind in group order."""
    cache = config.cache
    num_spec = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    drafts = tuple(len(row.draft_token_ids) for row in rows)
    attention: list[AttentionMetadata] = []
    gdn: list[GdnMetadata] = []
    for group_index, group in enumerate(cache.groups):
        tables = tuple(row.block_ids[group_index] for row in rows)
        if group.layer_type == "full_attention":
            kernel_tables = _kernel_tables(rows, tables, seq_lens, cache)
            kernel_size = cache.kernel_block_size or cache.block_size
            attention.append(
                attention_metadata(
                    scheduled,
                    seq_lens,
                    pad_table(kernel_tables),
                    [
                        slot(table, position, kernel_size)
                        for row, table, end in zip(rows, kernel_tables, seq_lens, strict=True)
                        for position in range(row.num_computed_tokens, end)
                    ],
                    num_spec,
                    stored_state,
                )
            )
        else:
            aligned = cache.block_size if cache.mamba_cache_mode == "align" else None
            gdn.append(
                gdn_metadata(
                    scheduled,
                    seq_lens,
                    tuple(row.num_prompt_tokens for row in rows),
                    tuple(
                        state_columns(table, end, num_spec, aligned)
                        for table, end in zip(tables, seq_lens, strict=True)
                    ),
                    decode_draft_counts(scheduled, drafts) if any(drafts) else None,
                    tuple(row.num_accepted_tokens for row in rows),
                    config.scheduler.quirks.gdn_fresh_decode,
                )
            )
    return tuple(attention), tuple(gdn)


def _kernel_tables(
    rows: Sequence[RequestState],
    tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    cache: CacheConfig,
) -> tuple[tuple[int, ...], ...]:
    for row, table, end in zip(rows, tables, seq_lens, strict=True):
        if end > len(table) * cache.block_size:
            raise RequestError(
                f"request {row.req_id!r}: {len(table)} blocks of {cache.block_size} tokens cannot "
                f"hold {end} tokens"
            )
    ratio = cache.block_size // (cache.kernel_block_size or cache.block_size)
    return tuple(kernel_blocks(table, ratio) for table in tables)
