"""One plan in, one batch out: rows, inputs and the metadata of both layer kinds.

Source: ``_prepare_inputs`` and ``_build_attention_metadata`` of
``vllm/v1/worker/gpu_model_runner.py`` and ``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from servespec.reference.batch.attention_state import classify
from servespec.reference.batch.block_tables import kernel_blocks, pad_table, slot, state_columns
from servespec.reference.batch.gdn_metadata import decode_draft_counts, gdn_metadata
from servespec.reference.batch.graph import dispatch, is_uniform_decode
from servespec.reference.batch.metadata import attention_metadata, cumulative
from servespec.reference.batch.padding import pad_query_start_loc
from servespec.reference.batch.persistent import (
    InputBatch,
    RequestState,
    state_boundary,
    update_states,
)
from servespec.reference.batch.reorder import (
    apply_swaps,
    region,
    reorder_threshold,
    swaps_into_regions,
)
from servespec.reference.batch.state_moves import Boundary, move_before_step, state_move
from servespec.reference.contracts import (
    AttentionMetadata,
    AttentionState,
    BatchRecord,
    CacheConfig,
    EngineConfig,
    GdnMetadata,
    GraphDispatch,
    RequestError,
    SchedulerOutput,
    StateMove,
)

__all__ = ["prepare", "state_saves"]


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
    batch, swaps = _reorder(update_states(batch, output), output, config)
    scheduled = tuple(output.num_scheduled_tokens[req_id] for req_id in batch.req_ids)
    for row, count in zip(batch.rows, scheduled, strict=True):
        _check_tokens(row, count)
    batch, boundaries = _move_states(batch, scheduled, config)

    rows = batch.rows
    computed = tuple(row.num_computed_tokens for row in rows)
    seq_lens = tuple(row.last_seq_len for row in rows)
    drafts = tuple(len(row.draft_token_ids) for row in rows)
    starts = cumulative(scheduled)
    states = classify(
        computed,
        scheduled,
        drafts,
        None if config.speculative is None else config.speculative.method,
        config.scheduler.enable_chunked_prefill,
    )
    graph = _graph_of_step(scheduled, computed, config)
    padded = starts
    if graph is not None and config.graph is not None and graph.mode == "FULL":
        padded = pad_query_start_loc(
            starts, graph.num_tokens, graph.num_reqs, config.graph.mode, 1 + _num_spec(config)
        )
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
        attention=_attention_groups(rows, starts, padded, states.stored, config),
        gdn=_gdn_groups(rows, scheduled, len(padded) - 1 - len(rows), config),
        num_draft_tokens=drafts if any(drafts) else (),
        is_prefilling=tuple(row.num_computed_tokens < row.num_prompt_tokens for row in rows),
        graph=graph,
        state_moves=_state_moves(rows, boundaries, config.cache),
    )
    return batch, record


def state_saves(
    batch: InputBatch, sampled: Mapping[str, tuple[int, ...]], config: EngineConfig
) -> tuple[tuple[StateMove, ...], ...]:
    """Return the state copies to make once a step has sampled, before `append_sampled`.

    Parameters
    ----------
    batch : InputBatch
        As `prepare` returned it for the step.
    sampled : mapping of str to tuple of int
        Kept tokens of each request.
    config : EngineConfig

    Returns
    -------
    tuple of tuple of StateMove
        For each GDN group; empty where states are not aligned.
    """
    crossed = [
        state_boundary(row, max(1, len(sampled.get(row.req_id, ()))), batch.state_block_size)
        for row in batch.rows
    ]
    # A state that rests where it is needs no copy.
    moved = [None if c is not None and c[0] == c[1] and c[2] == 0 else c for c in crossed]
    return _state_moves(batch.rows, moved, config.cache)


def _num_spec(config: EngineConfig) -> int:
    return 0 if config.speculative is None else config.speculative.num_speculative_tokens


def _reorder(
    batch: InputBatch, output: SchedulerOutput, config: EngineConfig
) -> tuple[InputBatch, tuple[tuple[int, int], ...]]:
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
    return replace(batch, req_ids=apply_swaps(batch.req_ids, swaps)), swaps


def _check_tokens(row: RequestState, num_scheduled: int) -> None:
    known = row.num_tokens + len(row.draft_token_ids)
    end = row.num_computed_tokens + num_scheduled
    if not 1 + len(row.draft_token_ids) <= num_scheduled or end > known:
        raise RequestError(
            f"request {row.req_id!r}: {num_scheduled} tokens scheduled after "
            f"{row.num_computed_tokens} computed ones: must be at least 1 and the "
            f"{len(row.draft_token_ids)} drafts, and end within the {known} known ones"
        )


def _move_states(
    batch: InputBatch, scheduled: Sequence[int], config: EngineConfig
) -> tuple[InputBatch, tuple[Boundary | None, ...]]:
    """Note how far each row gets, and where its aligned state must go for that.

    A state that moved was taken from the right column, so it counts as accepted once.
    """
    aligned = config.cache.mamba_cache_mode == "align" and config.cache.has_gdn
    block_size = config.cache.block_size if aligned else None
    forgets = config.scheduler.quirks.gdn_forgets_accepted
    requests = dict(batch.requests)
    boundaries: list[Boundary | None] = []
    for row, count in zip(batch.rows, scheduled, strict=True):
        end = row.num_computed_tokens + count
        accepted = 1 if forgets and row.req_id in batch.added else row.num_accepted_tokens
        boundary = (
            None
            if block_size is None
            else move_before_step(
                row.num_computed_tokens, row.last_seq_len, end, accepted, block_size
            )
        )
        boundaries.append(boundary)
        requests[row.req_id] = replace(
            row,
            num_accepted_tokens=accepted if boundary is None else 1,
            last_seq_len=end,
        )
    moved = replace(batch, requests=MappingProxyType(requests), state_block_size=block_size)
    return moved, tuple(boundaries)


def _state_moves(
    rows: Sequence[RequestState], boundaries: Sequence[Boundary | None], cache: CacheConfig
) -> tuple[tuple[StateMove, ...], ...]:
    if cache.mamba_cache_mode != "align":
        return ()
    return tuple(
        tuple(
            state_move(row.req_id, row.block_ids[index], boundary)
            for row, boundary in zip(rows, boundaries, strict=True)
            if boundary is not None
        )
        for index, group in enumerate(cache.groups)
        if group.layer_type == "linear_attention"
    )


def _graph_of_step(
    scheduled: Sequence[int], computed: Sequence[int], config: EngineConfig
) -> GraphDispatch | None:
    if config.graph is None:
        return None
    num_spec = _num_spec(config)
    return dispatch(
        config.graph,
        sum(scheduled),
        is_uniform_decode(scheduled, computed, num_spec),
        num_spec,
        config.scheduler.max_num_seqs,
    )


def _attention_groups(
    rows: Sequence[RequestState],
    starts: Sequence[int],
    padded: Sequence[int],
    stored_state: AttentionState,
    config: EngineConfig,
) -> tuple[AttentionMetadata, ...]:
    """Build the metadata of every full-attention group."""
    cache = config.cache
    kernel_size = cache.kernel_block_size or cache.block_size
    built: list[AttentionMetadata] = []
    for index, group in enumerate(cache.groups):
        if group.layer_type != "full_attention":
            continue
        tables = [_kernel_table(row, index, cache) for row in rows]
        built.append(
            attention_metadata(
                starts,
                [row.last_seq_len for row in rows],
                pad_table(tables),
                [
                    slot(table, position, kernel_size)
                    for row, table in zip(rows, tables, strict=True)
                    for position in range(row.num_computed_tokens, row.last_seq_len)
                ],
                _num_spec(config),
                stored_state,
                padded,
                config.scheduler.max_num_seqs,
            )
        )
    return tuple(built)


def _kernel_table(row: RequestState, index: int, cache: CacheConfig) -> tuple[int, ...]:
    held = row.block_ids[index]
    if row.last_seq_len > len(held) * cache.block_size:
        raise RequestError(
            f"request {row.req_id!r}: {len(held)} blocks of {cache.block_size} tokens cannot "
            f"hold {row.last_seq_len} tokens"
        )
    return kernel_blocks(held, cache.block_size // (cache.kernel_block_size or cache.block_size))


def _gdn_groups(
    rows: Sequence[RequestState],
    scheduled: Sequence[int],
    num_dummies: int,
    config: EngineConfig,
) -> tuple[GdnMetadata, ...]:
    """Build the metadata of every GDN group; dummy rows have no tokens there."""
    cache, num_spec = config.cache, _num_spec(config)
    block_size = cache.block_size if cache.mamba_cache_mode == "align" else None
    drafts = [len(row.draft_token_ids) for row in rows]
    nothing = (0,) * num_dummies
    decode_drafts = (*decode_draft_counts(scheduled, drafts), *((-1,) * num_dummies))
    accepted = (*(row.num_accepted_tokens for row in rows), *((1,) * num_dummies))
    return tuple(
        gdn_metadata(
            (*scheduled, *nothing),
            (*(row.last_seq_len for row in rows), *nothing),
            (*(row.num_prompt_tokens for row in rows), *nothing),
            (
                *(
                    state_columns(row.block_ids[index], row.last_seq_len, num_spec, block_size)
                    for row in rows
                ),
                *(((0,) * (1 + num_spec),) * num_dummies),
            ),
            decode_drafts if any(drafts) else None,
            accepted if num_spec > 0 else None,
            config.scheduler.quirks,
        )
        for index, group in enumerate(cache.groups)
        if group.layer_type == "linear_attention"
    )
