"""What a step decides while it is being planned, and the plan the worker gets.

Source: ``Scheduler.schedule`` and ``_make_cached_request_data`` of
``vllm/v1/core/sched/scheduler.py``, in the shape it gives to vLLM's V1 model runner: requests back
from preemption stay among the cached ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from servespec.reference.cache import groups as caches
from servespec.reference.contracts import (
    BlockTable,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from servespec.reference.scheduling.state import SchedulerState

__all__ = ["Plan", "make_output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions so far; mappings and tuples are in the order of decision.

    Attributes
    ----------
    budget : int
        Tokens left.
    defer_prefills : bool
        Whether prefills have to leave this step to decodes.
    running : tuple of str
        Running requests that were scheduled.
    new, resumed : tuple of str
        Requests admitted for the first time, and after a preemption.
    num_tokens : mapping of str to int
        Tokens of each scheduled request.
    new_blocks : mapping of str to BlockTable
        Blocks to append; the whole table of admitted requests.
    drafts : mapping of str to tuple of int
        Drafts among the scheduled tokens.
    has_prefill : bool
        Whether a running request in the middle of its prompt was scheduled.
    has_preempted : bool
        Whether a request was preempted, which keeps the step from admitting any.
    """

    budget: int
    defer_prefills: bool
    running: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    new_blocks: Mapping[str, BlockTable] = field(default_factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_prefill: bool = False
    has_preempted: bool = False


def make_output(state: SchedulerState, plan: Plan) -> tuple[SchedulerState, SchedulerOutput]:
    """Make the worker's plan, and drain what the cache has to tell it.

    Parameters
    ----------
    state : SchedulerState
        Computed tokens do not include this step's yet.
    plan : Plan

    Returns
    -------
    state : SchedulerState
    output : SchedulerOutput
    """
    cache = state.cache
    common = (0,) * len(state.layout.groups)
    if state.running:
        # The first running request stands for all, be it scheduled or not.
        common = caches.num_common_prefix_blocks(cache, state.running[0])
    cache, copies = caches.take_copies(cache)
    cache, fresh = caches.take_fresh_blocks(cache)
    output = SchedulerOutput(
        scheduled_new_reqs=tuple(_new_data(state, plan, name) for name in plan.new),
        scheduled_cached_reqs=_cached_data(state, plan),
        num_scheduled_tokens=plan.num_tokens,
        total_num_scheduled_tokens=sum(plan.num_tokens.values()),
        scheduled_spec_decode_tokens=plan.drafts,
        num_common_prefix_blocks=common,
        finished_req_ids=state.finished_req_ids,
        preempted_req_ids=state.preempted_req_ids,
        new_block_ids_to_zero=fresh,
        kv_cache_block_copies=copies,
        num_spec_tokens_to_schedule=state.num_spec_tokens,
    )
    return replace(state, cache=cache), output


def _new_data(state: SchedulerState, plan: Plan, request_id: str) -> NewRequestData:
    request = state.requests[request_id]
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=request.request.prompt_token_ids,
        sampling_params=request.request.sampling_params,
        block_ids=plan.new_blocks[request_id],
        num_computed_tokens=request.num_computed_tokens,
    )


def _cached_data(state: SchedulerState, plan: Plan) -> CachedRequestData:
    """Describe running and resumed rows.

    A worker drops a row that is not scheduled, so one that was not in the previous step comes with
    all its tokens.
    """
    req_ids = plan.running + plan.resumed
    rows = [state.requests[name] for name in req_ids]
    blocks = [plan.new_blocks[name] for name in req_ids]
    return CachedRequestData(
        req_ids=req_ids,
        resumed_req_ids=frozenset(plan.resumed),
        new_block_ids=tuple(table if any(table) else None for table in blocks),
        num_computed_tokens=tuple(row.num_computed_tokens for row in rows),
        num_output_tokens=tuple(
            row.num_output_tokens + row.num_output_placeholders for row in rows
        ),
        all_token_ids={
            row.request_id: row.all_token_ids
            for row in rows
            if row.request_id not in state.prev_step_req_ids
        },
    )
