"""V0 with the verbs of V1: a V0 plan as the plan that a V1 worker carries out.

Only groups of one sequence occur, because an engine samples one token a row. What V0 calls a swap
is a copy of pages here; a request that comes back, by recomputation or by swap, is a resumed one
whose whole block table is told anew; a request the budget did not reach loses its row for the
step and keeps its blocks.

Source: the V0 rules of `servespec.reference.scheduling.v0`, the plan of
``vllm/v1/core/sched/output.py``; where the pages are is told in
`servespec.reference.contracts.v0.V0EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from servespec.reference.contracts.config import EngineConfig, KVCacheGroup
from servespec.reference.contracts.errors import CacheTooSmallError, RequestError
from servespec.reference.contracts.request import EngineCoreOutput, FinishReason, Request
from servespec.reference.contracts.scheduling import (
    BlockCopy,
    BlockTable,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    SchedulerSnapshot,
)
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSample,
    V0EngineConfig,
    V0SchedulerOutput,
)
from servespec.reference.scheduling import v0
from servespec.reference.scheduling.v0_sequences import Sequence as V0Sequence

__all__ = [
    "V0EngineState",
    "abort_requests",
    "add_request",
    "has_unfinished_requests",
    "initial_state",
    "schedule",
    "snapshot",
    "update_from_output",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class V0EngineState:
    """A V0 scheduler and what its worker was told.

    Attributes
    ----------
    config : V0EngineConfig
    groups : tuple of KVCacheGroup
    scheduler : V0State
    plan : V0SchedulerOutput
        The last one.
    requests : mapping of str to Request
        Those that live.
    known : frozenset of str
        Requests the worker knows.
    ended : frozenset of str
        Those of them that ended since the last plan.
    tables : mapping of str to tuple of int
        V0 blocks that the worker holds for each running request.
    scheduled : frozenset of str
        Requests of the last step.
    """

    config: V0EngineConfig
    groups: tuple[KVCacheGroup, ...]
    scheduler: v0.V0State
    plan: V0SchedulerOutput = field(default_factory=V0SchedulerOutput)
    requests: Mapping[str, Request] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scheduled: frozenset[str] = frozenset()


def initial_state(config: EngineConfig, v0_config: V0EngineConfig) -> V0EngineState:
    """Return a scheduler without requests.

    Parameters
    ----------
    config : EngineConfig
    v0_config : V0EngineConfig
        ``config.v0``.
    """
    return V0EngineState(
        config=v0_config,
        groups=config.cache.groups,
        scheduler=v0.initial_state(v0_config.scheduler, v0_config.cache),
    )


def add_request(state: V0EngineState, request: Request) -> V0EngineState:
    """Queue a request.

    Raises
    ------
    DuplicateRequestError
        If a live request has this id.
    RequestError
        If it asks for a stop by repetition, which V0 does not know, or may not stop where
        ``max_model_len`` ends it.
    CacheTooSmallError
        If its blocks at its longest, the block that V0 wants free beside them and the watermark
        exceed the GPU blocks. So V0 never has to ignore a request later.
    """
    params = request.sampling_params
    if params.repetition_detection is not None:
        raise RequestError(
            f"Request({request.request_id!r}).sampling_params.repetition_detection is set:"
            " must be None with V0"
        )
    cache, limit = state.config.cache, state.config.scheduler.max_model_len
    room = limit + 1 - request.num_prompt_tokens
    if params.min_tokens > room:
        raise RequestError(
            f"Request({request.request_id!r}).sampling_params.min_tokens is {params.min_tokens}:"
            f" must be at most {room} with V0, which ends it there"
        )
    longest = min(request.num_prompt_tokens + params.max_tokens, limit)
    needed = -(-longest // cache.block_size) + 1 + cache.watermark_blocks
    if needed > cache.num_gpu_blocks:
        raise CacheTooSmallError(
            f"Request({request.request_id!r}) needs {needed} GPU blocks under V0: must be at most"
            f" {cache.num_gpu_blocks}"
        )
    group = SequenceGroupRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=params,
        arrival_time=request.arrival_time,
    )
    return replace(
        state,
        scheduler=v0.add_seq_group(state.scheduler, group),
        requests={**state.requests, request.request_id: request},
    )


def abort_requests(state: V0EngineState, request_ids: Sequence[str]) -> V0EngineState:
    """End requests from outside; ids that are not alive are ignored."""
    return _without(
        replace(state, scheduler=v0.abort_seq_group(state.scheduler, request_ids)),
        frozenset(request_ids).intersection(state.requests),
    )


def has_unfinished_requests(state: V0EngineState) -> bool:
    """Tell whether any request still waits or runs."""
    return v0.has_unfinished_seqs(state.scheduler)


def schedule(state: V0EngineState) -> tuple[V0EngineState, SchedulerOutput]:
    """Plan one step.

    Returns
    -------
    V0EngineState
    SchedulerOutput
        New requests are those the worker never saw. Swaps come before copies on write in
        `SchedulerOutput.kv_cache_block_copies`, a copy for every group.

    Raises
    ------
    V0SchedulingError
        If V0 gives up: the CPU blocks do not hold what it has to swap out.
    """
    scheduler, plan = v0.schedule(state.scheduler)
    finished = state.known & state.ended
    state = replace(state, known=state.known - finished, ended=frozenset())
    running = {group.request_id: group.seqs[0] for group in scheduler.running}
    tables = {group.request_id: _only(group.block_tables) for group in plan.scheduled_seq_groups}
    news: list[NewRequestData] = []
    cached = CachedRequestData()
    for req_id, table in tables.items():
        seq = running[req_id]
        if req_id in state.known:
            cached = _with_cached(state, cached, req_id, seq, table)
        else:
            news.append(
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=seq.prompt_token_ids,
                    sampling_params=state.requests[req_id].sampling_params,
                    block_ids=_pages(state, table),
                    num_computed_tokens=0,
                )
            )
    chunks = {group.request_id: group.token_chunk_size for group in plan.scheduled_seq_groups}
    output = SchedulerOutput(
        scheduled_new_reqs=tuple(news),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=chunks,
        total_num_scheduled_tokens=sum(chunks.values()),
        num_common_prefix_blocks=(0,) * len(state.groups),
        finished_req_ids=finished,
        preempted_req_ids=frozenset(state.tables) - running.keys(),
        kv_cache_block_copies=_copies(state, plan),
    )
    kept = {req_id: table for req_id, table in state.tables.items() if req_id in running}
    state = replace(
        state,
        scheduler=scheduler,
        plan=plan,
        known=state.known | tables.keys(),
        tables={**kept, **tables},
        scheduled=frozenset(tables),
    )
    return state, output


def update_from_output(
    state: V0EngineState, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
) -> tuple[V0EngineState, tuple[EngineCoreOutput, ...]]:
    """Take in the tokens of the step planned last.

    Parameters
    ----------
    state : V0EngineState
    output : SchedulerOutput
        That step's plan.
    sampled : mapping of str to tuple of int
        One token for every request whose row is kept.

    Returns
    -------
    V0EngineState
    tuple of EngineCoreOutput
        Of the requests that were given a token.
    """
    samples = {
        group.request_id: (
            SequenceSample(
                parent_seq_id=next(iter(group.block_tables)),
                token_id=sampled[group.request_id][0],
            ),
        )
        for group in state.plan.scheduled_seq_groups
        if group.do_sample
    }
    scheduler, results = v0.update_from_output(state.scheduler, state.plan, samples)
    outputs = tuple(
        EngineCoreOutput(
            request_id=result.request_id,
            new_token_ids=(item.new_token_id,),
            finish_reason=item.finish_reason,
            stop_reason=_stop_token(
                state.requests[result.request_id], item.new_token_id, item.finish_reason
            ),
        )
        for result in results
        for item in result.outputs
    )
    ended = frozenset(result.request_id for result in results if result.finished)
    return _without(replace(state, scheduler=scheduler), ended), outputs


def snapshot(state: V0EngineState) -> SchedulerSnapshot:
    """Return the state as far as checks compare it.

    Free blocks and reference counts are those of the first group's region; swapped requests stand
    in `SchedulerSnapshot.skipped_waiting`, and a table is shown where its blocks are.
    """
    seen = v0.snapshot(state.scheduler)
    owners = {seqs[0].seq_id: req_id for req_id, seqs in seen.sequences.items()}
    config = state.config
    return SchedulerSnapshot(
        free_blocks=(
            *(config.gpu_block(0, block) for block in seen.free_gpu_blocks),
            *(config.cpu_block(0, block) for block in seen.free_cpu_blocks),
        ),
        ref_counts=(0, *seen.gpu_ref_counts, *seen.cpu_ref_counts),
        block_tables={
            owners[seq_id]: _pages(state, blocks, on_gpu)
            for on_gpu, tables in ((True, seen.gpu_block_tables), (False, seen.cpu_block_tables))
            for seq_id, blocks in tables.items()
            if seq_id in owners
        },
        running=seen.running,
        waiting=seen.waiting,
        skipped_waiting=seen.swapped,
        num_computed_tokens={
            req_id: seqs[0].num_computed_tokens for req_id, seqs in seen.sequences.items()
        },
        num_output_placeholders=dict.fromkeys(seen.sequences, 0),
    )


def _without(state: V0EngineState, ended: frozenset[str]) -> V0EngineState:
    """Forget requests that ended; the worker is told with the next plan."""
    return replace(
        state,
        requests={k: v for k, v in state.requests.items() if k not in ended},
        tables={k: v for k, v in state.tables.items() if k not in ended},
        ended=state.ended | ended,
    )


def _only(tables: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    (table,) = tables.values()
    return table


def _pages(state: V0EngineState, table: tuple[int, ...], on_gpu: bool = True) -> BlockTable:
    """Return a table's pages: all of them for attention, the first for a GDN state."""
    page = state.config.gpu_block if on_gpu else state.config.cpu_block
    return tuple(
        tuple(
            page(index, block)
            for block in (table if group.layer_type == "full_attention" else table[:1])
        )
        for index, group in enumerate(state.groups)
    )


def _with_cached(
    state: V0EngineState,
    cached: CachedRequestData,
    req_id: str,
    seq: V0Sequence,
    table: tuple[int, ...],
) -> CachedRequestData:
    """Add a request the worker knows: what is new of its table, or all of it if it comes back."""
    held = state.tables.get(req_id)
    pages = _pages(state, table)
    new: BlockTable | None = pages
    if held is not None:
        new = tuple(
            ids[len(known) :] for ids, known in zip(pages, _pages(state, held), strict=True)
        )
        new = new if any(new) else None
    tokens = {} if req_id in state.scheduled else {req_id: _all_token_ids(seq)}
    return CachedRequestData(
        req_ids=(*cached.req_ids, req_id),
        resumed_req_ids=cached.resumed_req_ids | ({req_id} if held is None else frozenset()),
        new_block_ids=(*cached.new_block_ids, new),
        num_computed_tokens=(*cached.num_computed_tokens, seq.num_computed_tokens),
        num_output_tokens=(*cached.num_output_tokens, len(seq.output_token_ids)),
        all_token_ids={**cached.all_token_ids, **tokens},
    )


def _all_token_ids(seq: V0Sequence) -> tuple[int, ...]:
    return seq.prompt_token_ids + seq.output_token_ids


def _copies(state: V0EngineState, plan: V0SchedulerOutput) -> tuple[BlockCopy, ...]:
    gpu, cpu = state.config.gpu_block, state.config.cpu_block
    kinds = (
        (plan.blocks_to_swap_out, gpu, cpu),
        (plan.blocks_to_swap_in, cpu, gpu),
        (plan.blocks_to_copy, gpu, gpu),
    )
    return tuple(
        BlockCopy(src_block_id=source(group, a), dst_block_id=target(group, b))
        for moves, source, target in kinds
        for a, b in moves
        for group in range(len(state.groups))
    )


def _stop_token(request: Request, token: int, reason: FinishReason | None) -> int | None:
    """Return the token that stopped a request, unless it is its end of sequence."""
    stopped = reason is FinishReason.STOP and token != request.sampling_params.eos_token_id
    return token if stopped else None
