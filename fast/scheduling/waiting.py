"""The pass over waiting requests: who is admitted.

Source: the waiting loop of ``Scheduler.schedule`` of ``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from servespec.fast.scheduling.chunks import aligned_chunk
from servespec.fast.scheduling.plan import Admission, Plan
from servespec.fast.scheduling.queues import PriorityQueue, WaitingQueue
from servespec.fast.scheduling.state import State
from servespec.reference.contracts import RequestStatus

__all__ = ["schedule_waiting"]


def schedule_waiting(state: State, plan: Plan, *, defer_prefills: bool) -> None:
    """Admit waiting requests until one does not fit; nobody overtakes it.

    Parameters
    ----------
    state : State
    plan : Plan
        Extended in place.
    defer_prefills : bool
        Whether no prefill may start in this step.
    """
    requests = state.requests
    passed_over = state.new_queue()
    while (
        plan.budget > 0
        and len(state.running) < state.config.max_num_seqs
        and (queue := _next_queue(state)) is not None
    ):
        slot = queue.peek()
        # A token still on its way would be sampled a second time.
        awaits_output = requests.num_stale[slot] > 0 and not requests.drop_stale[slot]
        if awaits_output or not state.hooks.may_start(requests.request(slot)):
            queue.pop()
            passed_over.prepend(slot)
            continue
        if not _admit(state, plan, slot, defer_prefills=defer_prefills):
            break
        queue.pop()
    if len(passed_over):
        state.skipped.prepend_all(passed_over)
    if not defer_prefills:
        state.capacity_bound = len(state.waiting) > 0


def _next_queue(state: State) -> WaitingQueue | None:
    waiting, skipped = state.waiting, state.skipped
    if not len(waiting) or not len(skipped):
        return (waiting if len(waiting) else skipped) if len(waiting) or len(skipped) else None
    if isinstance(waiting, PriorityQueue) and isinstance(skipped, PriorityQueue):
        return waiting if waiting.head_rank < skipped.head_rank else skipped
    return skipped


def _admit(state: State, plan: Plan, slot: int, *, defer_prefills: bool) -> bool:
    """Admit one request; False, with nothing changed but its shared prefix, if it does not fit."""
    requests, cache, config = state.requests, state.cache, state.config
    num_tokens = int(requests.num_tokens[slot])
    start = int(requests.num_computed[slot])
    hit = None
    if start == 0:
        hit = cache.find_hit(slot)
        requests.shared_prefix[slot] = hit.shared_prefix if hit else 0
        start = hit.num_tokens if hit else 0
    if defer_prefills and start < num_tokens - 1:
        return False
    count = num_tokens - start
    # Beside decodes with drafts a lone token would break the uniform shape of the batch.
    padded = count == 1 and state.num_spec_tokens > 0 and plan.num_running and not plan.any_chunk
    if padded:
        count += state.num_spec_tokens
        if count > plan.budget or start + count > config.max_model_len:
            return False
    num_drafts = count - 1 if padded else 0
    if 0 < config.long_prefill_token_threshold < count:
        count = config.long_prefill_token_threshold
    if not config.enable_chunked_prefill and count > plan.budget:
        return False
    count = min(count, plan.budget)
    if cache.aligned:
        count = aligned_chunk(state, slot, start, count)
        if count == 0:
            return False
    if padded and not config.quirks.padded_admission_cut_late:
        num_drafts = count - 1
    blocks = cache.allocate(
        slot,
        count,
        hit,
        admission=True,
        reserve_full=config.scheduler_reserve_full_isl,
        others_run=len(state.running) > 0,
    )
    if blocks is None:
        return False
    resumed = bool(requests.status[slot] == RequestStatus.PREEMPTED)
    state.running.append(slot)
    plan.add(slot, count)
    plan.admissions.append(
        Admission(slot, requests.request(slot), resumed, cache.block_table(slot))
    )
    requests.status[slot] = RequestStatus.RUNNING
    requests.num_computed[slot] = start
    if num_drafts:
        plan.padded[slot] = num_drafts
    return True
