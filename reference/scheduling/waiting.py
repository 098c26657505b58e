"""The second half of a step: requests that wait are admitted, first in line first.

Source: the loop over ``self.waiting`` in ``Scheduler.schedule`` of
``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from servespec.reference.cache import groups as caches
from servespec.reference.cache.groups import PrefixHit
from servespec.reference.contracts import BlockTable, RequestStatus
from servespec.reference.scheduling.chunks import aligned_split, under_threshold
from servespec.reference.scheduling.hooks import BLOCKED_STATUSES
from servespec.reference.scheduling.plan import Plan
from servespec.reference.scheduling.queues import prepend
from servespec.reference.scheduling.state import RequestState, SchedulerState

__all__ = ["admitted_chunk", "must_wait", "schedule_waiting", "takes_skipped"]


def schedule_waiting(state: SchedulerState, plan: Plan) -> tuple[SchedulerState, Plan]:
    """Admit waiting requests while budget, seats and blocks are left.

    The first in line that cannot be admitted ends the loop: nobody overtakes it, so a request that
    needs much is not starved by ones that need little. Only a request that must not run yet
    (`must_wait`) is set aside, and stands in front of `skipped_waiting` in the next step.

    Parameters
    ----------
    state : SchedulerState
    plan : Plan
        What the running requests left.

    Returns
    -------
    state : SchedulerState
    plan : Plan
    """
    config = state.config
    requests, cache = dict(state.requests), state.cache
    running, waiting, skipped = list(state.running), state.waiting, state.skipped_waiting
    budget = plan.budget
    new: list[str] = []
    resumed: list[str] = []
    num_tokens = dict(plan.num_tokens)
    new_blocks: dict[str, BlockTable] = dict(plan.new_blocks)
    drafts = dict(plan.drafts)
    set_aside: list[str] = []

    while (waiting or skipped) and budget > 0 and len(running) < config.max_num_seqs:
        from_skipped = takes_skipped(state, waiting, skipped, requests)
        name = skipped[0] if from_skipped else waiting[0]
        request = requests[name]
        rest = (waiting, skipped[1:]) if from_skipped else (waiting[1:], skipped)
        if must_wait(request):
            waiting, skipped = rest
            set_aside.append(name)
            continue

        hit = caches.find_longest_cache_hit(cache, request)
        request = replace(request, shared_prefix_boundary=hit.shared_prefix_boundary)
        requests[name] = request
        if plan.defer_prefills and hit.num_tokens < request.num_tokens - 1:
            break
        chunk, padding = admitted_chunk(state, plan, request, hit, budget)
        if chunk == 0:
            break
        cache, blocks = caches.allocate_slots(
            cache,
            request,
            chunk,
            hit,
            num_reserved=state.layout.watermark_blocks if running else 0,
            full_sequence_must_fit=config.scheduler_reserve_full_isl,
        )
        if blocks is None:
            break

        waiting, skipped = rest
        running.append(name)
        (new if request.status is RequestStatus.WAITING else resumed).append(name)
        requests[name] = replace(
            request, status=RequestStatus.RUNNING, num_computed_tokens=hit.num_tokens
        )
        new_blocks[name] = cache.block_table(name)
        num_tokens[name] = chunk
        budget -= chunk
        if padding:
            drafts[name] = (-1,) * padding

    bound = state.prefill_capacity_bound if plan.defer_prefills else bool(waiting)
    state = replace(
        state,
        requests=requests,
        cache=cache,
        running=tuple(running),
        waiting=waiting,
        skipped_waiting=prepend(skipped, set_aside, config.policy, requests),
        prefill_capacity_bound=bound,
    )
    plan = replace(
        plan,
        budget=budget,
        new=tuple(new),
        resumed=tuple(resumed),
        num_tokens=num_tokens,
        new_blocks=new_blocks,
        drafts=drafts,
    )
    return state, plan


def must_wait(request: RequestState) -> bool:
    """Whether a request in line must not run yet.

    Output that steps in flight computed before its preemption is still to come; if it ran now it
    would sample positions again that this output fills. Or it waits for something outside the
    scheduler.
    """
    stale = request.num_stale_output_tokens > 0 and not request.drop_stale_output
    return stale or request.status in BLOCKED_STATUSES


def takes_skipped(
    state: SchedulerState,
    waiting: tuple[str, ...],
    skipped: tuple[str, ...],
    requests: Mapping[str, RequestState],
) -> bool:
    """Whether the next in line is one that was set aside in an earlier step.

    Under ``fcfs`` those go first; under ``priority`` the more urgent head of both queues does.
    """
    if not skipped or not waiting or state.config.policy == "fcfs":
        return bool(skipped)
    return requests[skipped[0]].queue_key < requests[waiting[0]].queue_key


def admitted_chunk(
    state: SchedulerState, plan: Plan, request: RequestState, hit: PrefixHit, budget: int
) -> tuple[int, int]:
    """Return the tokens of an admitted request's first chunk, and the drafts that pad it.

    A request that lacks only its last token would be the one row without drafts among decodes with
    drafts, and cost the step its uniform shape. It gets K placeholder drafts, all to be rejected,
    or waits if they do not fit.

    Parameters
    ----------
    state : SchedulerState
    plan : Plan
    request : RequestState
    hit : PrefixHit
    budget : int
        Tokens left in the step, at least 1.

    Returns
    -------
    chunk : int
        0 if the request cannot be admitted now.
    padding : int
        Drafts among the chunk.
    """
    config, start = state.config, hit.num_tokens
    chunk = request.num_tokens - start
    padded = (
        chunk == 1 and state.num_spec_tokens > 0 and bool(plan.running) and not plan.has_prefill
    )
    if padded:
        chunk += state.num_spec_tokens
        if chunk > budget or start + chunk > config.max_model_len:
            return 0, 0
    chunk = under_threshold(state, chunk)
    if not config.enable_chunked_prefill and chunk > budget:
        return 0, 0
    chunk = aligned_split(state, request, start, min(chunk, budget))
    if not padded:
        return chunk, 0
    return chunk, state.num_spec_tokens if state.quirks.padded_admission_cut_late else chunk - 1
