"""The pass over running requests.

All requests are first looked at together: most take their tokens without touching the pool. Those
that need it (a block, a hash, a state given up, a chunk to be cut) are then handled one by one, in
order. From the first request on that lacks budget or blocks, every one is handled on its own.

Source: the running loop of ``Scheduler.schedule`` of ``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import IntArray
from servespec.fast.scheduling.chunks import num_new_tokens
from servespec.fast.scheduling.plan import Plan
from servespec.fast.scheduling.state import State

__all__ = ["schedule_running"]


def schedule_running(state: State, plan: Plan, *, defer_prefills: bool) -> None:
    """Plan the running requests in the order of their admission.

    Parameters
    ----------
    state : State
    plan : Plan
        Extended in place.
    defer_prefills : bool
        Whether requests still in their prefill are passed over.
    """
    if plan.budget <= 0 or len(state.running) == 0:
        return
    first = _schedule_together(state, plan, defer_prefills=defer_prefills)
    _schedule_one_by_one(state, plan, first, defer_prefills=defer_prefills)


def _schedule_together(state: State, plan: Plan, *, defer_prefills: bool) -> int:
    """Plan the leading requests that get all they want; return the index of the next one."""
    slots = state.running.slots.copy()
    counts, special = _wanted(state, slots, defer_prefills=defer_prefills)
    end = len(slots)
    spent = np.cumsum(np.maximum(counts, 0))
    if spent[-1] > plan.budget:
        end = int(np.searchsorted(spent, plan.budget, side="right"))
    places = np.flatnonzero(special[:end])
    if places.size and not _grow_together(state, plan, slots[places], counts[places]):
        end = _handle(state, plan, slots, counts, spent, places, end)
    planned = counts[:end] != 0
    if planned.all():
        plan.head_slots, plan.head_counts = slots[:end], counts[:end]
    else:
        plan.head_slots, plan.head_counts = slots[:end][planned], counts[:end][planned]
    plan.budget -= int(plan.head_counts.sum())
    if state.num_spec_tokens:
        plan.any_chunk = bool(state.requests.is_chunk[plan.head_slots].any())
    return end


def _wanted(
    state: State, slots: IntArray, *, defer_prefills: bool
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return what each request would take of an endless budget, and who needs a closer look.

    Returns
    -------
    counts : array of int64, shape (len(slots),)
        0 for requests passed over.
    special : array of bool, shape (len(slots),)
        Whether more than counters changes if the request takes its tokens.
    """
    requests, cache, config = state.requests, state.cache, state.config
    computed = requests.num_computed[slots]
    known = requests.num_tokens[slots]
    counts = known - computed
    if requests.any_drafts:
        counts += requests.num_drafts[slots]
    idle = None
    if config.async_scheduling:
        placeholders = requests.num_placeholders[slots]
        counts += placeholders
        idle = (placeholders > 0) & (computed + 2 - placeholders >= requests.max_total[slots])
    if config.long_prefill_token_threshold:
        np.minimum(counts, config.long_prefill_token_threshold, out=counts)
    np.minimum(counts, config.max_model_len - 1 - computed, out=counts)
    if defer_prefills:
        chunks = requests.is_chunk[slots] != 0
        idle = chunks if idle is None else idle | chunks
    if idle is not None:
        counts[idle] = 0
    if not config.quirks.negative_schedule:
        np.maximum(counts, 0, out=counts)
    ends = computed + counts
    special = ends > cache.room[slots]
    if cache.hashing:
        special |= np.minimum(ends, known) >= cache.cache_at[slots]
    if cache.aligned:
        processed = np.maximum(computed - requests.num_in_flight[slots], 0)
        special |= (processed - 1) // cache.block_size != cache.skip_mark[slots]
        special |= computed < np.maximum(requests.num_prompt[slots], known - 1)
    special |= (counts < 0) | cache.fine
    special &= counts != 0
    return counts, special


def _grow_together(state: State, plan: Plan, slots: IntArray, counts: IntArray) -> bool:
    """Serve requests that each need at most one block of one group; False if that is not so."""
    cache = state.cache
    group = cache.growing_group
    if group is None or (counts < 0).any():
        return False
    ends = state.requests.num_computed[slots] + counts
    needing = ends > cache.room[slots]
    grown = slots[needing]
    if len(grown) > cache.pool.num_free or not cache.one_block_is_enough(grown, ends[needing]):
        return False
    if len(grown):
        plan.grown_group = group
        plan.grown_slots, plan.grown_ids = grown, cache.allocate_each(grown, group)
    if cache.hashing:
        lengths = np.minimum(ends, state.requests.num_tokens[slots])
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            cache.cache(slot, length)
    return True


def _handle(
    state: State,
    plan: Plan,
    slots: IntArray,
    counts: IntArray,
    spent: IntArray,
    places: IntArray,
    end: int,
) -> int:
    """Serve the requests at `places` one by one, correcting `counts`.

    Returns
    -------
    int
        Requests before this index are served; `end` unless blocks ran out.
    """
    saved = 0
    for place in places.tolist():
        slot, wanted = int(slots[place]), max(int(counts[place]), 0)
        left = plan.budget - int(spent[place]) + wanted + saved
        if left <= 0:
            return int(place)
        count = num_new_tokens(state, slot, left)
        counts[place] = count
        saved += wanted - count
        if count == 0:
            continue
        blocks = state.cache.allocate(slot, count)
        if blocks is None:
            return int(place)
        if any(blocks):
            plan.blocks[slot] = blocks
    return end


def _schedule_one_by_one(state: State, plan: Plan, index: int, *, defer_prefills: bool) -> None:
    """Plan the running requests from `index` on, preempting others where blocks are short."""
    requests, running = state.requests, state.running
    while index < len(running) and plan.budget > 0:
        slot = running[index]
        count = 0
        if not (defer_prefills and requests.is_chunk[slot]):
            count = num_new_tokens(state, slot, plan.budget)
        if count == 0:
            index += 1
            continue
        while (blocks := state.cache.allocate(slot, count)) is None:
            victim, index = _take_victim(state, plan, index)
            state.preempt(victim)
            plan.preempted = True
            if victim == slot:
                return
        plan.add(slot, count)
        plan.num_tail_running += 1
        plan.any_chunk |= bool(requests.is_chunk[slot])
        if any(blocks):
            plan.blocks[slot] = blocks
        index += 1


def _take_victim(state: State, plan: Plan, index: int) -> tuple[int, int]:
    """Take the request to be preempted off the running list.

    Returns
    -------
    victim : int
        Its slot.
    index : int
        Where the request being served stands now.
    """
    running = state.running
    if state.config.policy == "fcfs":
        return running.pop(), index
    ranks = []
    for slot in running.slots.tolist():
        request = state.requests.request(slot)
        ranks.append((request.priority, request.arrival_time))
    place = ranks.index(max(ranks))
    victim = running.pop(place)
    withdrawn = plan.withdraw(victim)
    if withdrawn or (place < index and not state.config.quirks.priority_victim_skips_next):
        index -= 1
    return victim, index
