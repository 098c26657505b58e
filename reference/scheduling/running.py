"""The first half of a step: requests that already run, in order of admission.

Source: the loop over ``self.running`` in ``Scheduler.schedule`` of
``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from dataclasses import replace

from servespec.reference.cache import groups as caches
from servespec.reference.contracts import BlockTable
from servespec.reference.scheduling.chunks import is_beyond_max_tokens, running_chunk
from servespec.reference.scheduling.plan import Plan
from servespec.reference.scheduling.preemption import choose_victim, preempted
from servespec.reference.scheduling.queues import prepend
from servespec.reference.scheduling.state import RequestState, SchedulerState

__all__ = ["kept_drafts", "schedule_running"]


def schedule_running(state: SchedulerState, plan: Plan) -> tuple[SchedulerState, Plan]:
    """Schedule running requests while tokens are left in the budget.

    A request that gets no tokens (it waits for output in flight, is held back by throttling, or
    needs a larger budget for a block-aligned chunk) is passed over, and later ones may overtake
    it. A request that gets no blocks makes others give theirs up, last admitted first (or least
    urgent first), until it fits or is itself the victim; in that case nobody after it runs either.

    Parameters
    ----------
    state : SchedulerState
    plan : Plan
        Empty but for its budget.

    Returns
    -------
    state : SchedulerState
    plan : Plan
    """
    quirks, policy = state.quirks, state.config.policy
    requests, cache, waiting = dict(state.requests), state.cache, state.waiting
    running = list(state.running)
    budget, has_prefill = plan.budget, False
    scheduled: list[str] = []
    num_tokens: dict[str, int] = {}
    new_blocks: dict[str, BlockTable] = {}
    drafts: dict[str, tuple[int, ...]] = {}
    victims: set[str] = set()

    index = 0
    while index < len(running) and budget > 0:
        request = requests[running[index]]
        chunk = 0
        if not is_beyond_max_tokens(request) and not (
            plan.defer_prefills and request.is_prefill_chunk
        ):
            chunk = running_chunk(state, request, budget)
        if chunk == 0 or (chunk < 0 and not quirks.negative_schedule):
            index += 1
            continue

        cache, blocks = caches.allocate_slots(cache, request, chunk)
        while blocks is None:
            position = choose_victim(running, policy, requests, quirks.victim_tie_ignores_id)
            victim = requests[running.pop(position)]
            name = victim.request_id
            if name in num_tokens:
                scheduled.remove(name)
                budget += num_tokens.pop(name)
                del new_blocks[name]
                drafts.pop(name, None)
                index -= 1
                if not quirks.preempted_step_stays_cached:
                    cache = caches.withdraw_uncomputed(cache, victim)
            elif position < index and not quirks.priority_victim_skips_next:
                index -= 1
            cache = caches.free(cache, name)
            requests[name] = preempted(victim, drop_stale_output=False)
            waiting = prepend(waiting, (name,), policy, requests)
            victims.add(name)
            if victim is request:
                break
            cache, blocks = caches.allocate_slots(cache, request, chunk)
        if blocks is None:
            break

        name = request.request_id
        scheduled.append(name)
        has_prefill |= request.is_prefill_chunk
        new_blocks[name] = blocks
        num_tokens[name] = chunk
        budget -= chunk
        index += 1
        if request.spec_token_ids:
            kept = kept_drafts(request, chunk)
            if kept:
                drafts[name] = kept
            requests[name] = replace(request, spec_token_ids=())

    state = replace(
        state,
        requests=requests,
        cache=cache,
        running=tuple(running),
        waiting=waiting,
        preempted_req_ids=state.preempted_req_ids | victims,
    )
    plan = replace(
        plan,
        budget=budget,
        running=tuple(scheduled),
        num_tokens=num_tokens,
        new_blocks=new_blocks,
        drafts=drafts,
        has_prefill=has_prefill,
        has_preempted=bool(victims),
    )
    return state, plan


def kept_drafts(request: RequestState, chunk: int) -> tuple[int, ...]:
    """Return the drafts among the next `chunk` tokens, those that follow the known ones.

    The drafts of a request are used up when it is scheduled, whether they fit or not.
    """
    known = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return request.spec_token_ids[: max(chunk - known, 0)]
