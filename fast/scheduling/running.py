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
from servespec.fast.cache.together import Together
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
    slots = state.running.view(state.requests).slots
    counts, special = _wanted(state, defer_prefills=defer_prefills)
    end = len(slots)
    fewest, total = int(counts.min()), int(counts.sum())
    if fewest < 0 or total > plan.budget:
        spent = np.maximum(counts, 0).cumsum()
        end = int(np.searchsorted(spent, plan.budget, side="right"))
    if special.any():
        places = np.flatnonzero(special[:end])
        end = _serve(state, plan, counts, places, end)
        fewest = 0
    if end < len(slots):
        slots, counts = slots[:end], counts[:end]
    if fewest <= 0:
        planned = counts != 0
        slots, counts = slots[planned], counts[planned]
    plan.head_slots, plan.head_counts = slots, counts
    plan.budget -= int(counts.sum())
    if state.num_spec_tokens:
        plan.any_chunk = bool(state.requests.is_chunk[slots].any())
    return end


def _wanted(state: State, *, defer_prefills: bool) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return what each request would take of an endless budget, and who needs a closer look.

    Returns
    -------
    counts : array of int64, shape (number of running requests,)
        0 for requests passed over.
    special : array of bool, same shape
        Whether more than counters changes if the request takes its tokens.
    """
    requests, cache, config = state.requests, state.cache, state.config
    view = state.running.view(requests)
    slots = view.slots
    computed = requests.num_computed[slots]
    known = requests.num_tokens[slots]
    counts = known - computed
    if requests.any_drafts:
        counts += requests.num_drafts[slots]
    idle = None
    if config.async_scheduling:
        placeholders = requests.num_placeholders[slots]
        counts += placeholders
        idle = (computed + 2 - placeholders >= view.max_total) & (placeholders > 0)
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
        special |= computed < np.maximum(view.num_prompt, known - 1)
    if cache.fine:
        special[:] = True
    if config.quirks.negative_schedule:
        special |= counts < 0
    special &= counts != 0
    return counts, special


def _serve(state: State, plan: Plan, counts: IntArray, places: IntArray, end: int) -> int:
    """Serve the requests at `places` in order, correcting `counts`.

    Returns
    -------
    int
        Requests before this index are served; `end` unless budget or blocks ran out.
    """
    requests = state.requests
    slots = state.running.view(requests).slots[places]
    computed = requests.num_computed[slots]
    known = requests.num_tokens[slots]
    processed = np.maximum(computed - requests.num_in_flight[slots], 0)
    together = Together(state.cache, slots, computed + counts[places], known, processed)
    simple = together.simple & (counts[places] > 0)
    if state.cache.aligned:
        # A prefill may have to be cut.
        simple &= computed >= np.maximum(requests.num_prompt[slots], known - 1)
    before = np.maximum(counts, 0).cumsum()[places] - np.maximum(counts[places], 0)
    saved = 0
    index = 0
    while index < len(places):
        stop = index + _leading(simple[index:])
        if stop > index:
            ids = together.serve(index, stop)
            if ids is not None:
                some = ids.any(axis=1)
                plan.grown.append((slots[index:stop][some], ids[some]))
                index = stop
                continue
            # Serve as many as there are blocks for, and let the rest preempt.
            simple[index:stop] = False
        place, wanted = int(places[index]), int(counts[places[index]])
        left = plan.budget - int(before[index]) + saved
        if left <= 0:
            return place
        count = num_new_tokens(state, int(slots[index]), left)
        counts[place] = count
        saved += max(wanted, 0) - count
        if count != 0:
            blocks = state.cache.allocate(int(slots[index]), count)
            if blocks is None:
                return place
            if any(blocks):
                plan.blocks[int(slots[index])] = blocks
        index += 1
    return end


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """Count the leading true values."""
    return len(flags) if flags.all() else int(flags.argmin())


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
    by_id = not state.config.quirks.victim_tie_ignores_id
    ranks = []
    for slot in running.slots.tolist():
        request = state.requests.request(slot)
        tie = request.request_id if by_id else ""
        ranks.append((request.priority, request.arrival_time, tie))
    place = ranks.index(max(ranks))
    victim = running.pop(place)
    withdrawn = plan.withdraw(victim)
    if withdrawn:
        state.cache.retract(victim)
    if withdrawn or (place < index and not state.config.quirks.priority_victim_skips_next):
        index -= 1
    return victim, index
