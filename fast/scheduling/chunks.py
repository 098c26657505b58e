"""How many tokens one request takes in one step."""

from __future__ import annotations

from servespec.fast.scheduling.state import State

__all__ = ["aligned_chunk", "num_new_tokens"]


def num_new_tokens(state: State, slot: int, budget: int) -> int:
    """Count the tokens that a running request takes; 0 means that it is passed over.

    Parameters
    ----------
    state : State
    slot : int
    budget : int
        Tokens the step may still hold.

    Notes
    -----
    A negative number is possible only with the quirk ``negative_schedule``. Source: the running
    loop of ``Scheduler.schedule``.
    """
    requests = state.requests
    computed = int(requests.num_computed[slot])
    placeholders = int(requests.num_placeholders[slot])
    if placeholders > 0 and computed + 2 - placeholders >= requests.max_total[slot]:
        # Even if all drafts in flight are rejected, the last token is on its way.
        return 0
    count = int(requests.num_tokens[slot] + requests.num_drafts[slot]) + placeholders - computed
    if 0 < state.config.long_prefill_token_threshold < count:
        count = state.config.long_prefill_token_threshold
    count = min(count, budget, state.config.max_model_len - computed - 1)
    if state.cache.aligned:
        count = aligned_chunk(state, slot, computed, count)
    return count if count > 0 or state.config.quirks.negative_schedule else 0


def aligned_chunk(state: State, slot: int, start: int, count: int) -> int:
    """Cut a prefill chunk where a GDN state has to be kept.

    Parameters
    ----------
    state : State
    slot : int
    start : int
        Computed tokens before the chunk.
    count : int
        Tokens of the chunk so far.

    Returns
    -------
    int
        Tokens of the chunk; 0 if no aligned chunk fits.

    Notes
    -----
    Block i keeps the state after exactly i + 1 blocks of tokens, and a state exists only where a
    chunk ends. Source: ``Scheduler._mamba_block_aligned_split``.
    """
    requests = state.requests
    cache = state.cache
    size = cache.block_size
    num_tokens = int(requests.num_tokens[slot])
    num_prompt = int(requests.num_prompt[slot])
    # A resumed request computes its output again like a prompt, all but the last token.
    prefill_end = max(num_prompt, num_tokens - 1)
    if start >= prefill_end:
        return count
    last = num_tokens - num_tokens % size
    if state.use_eagle:
        # A hit will lose its last attention block, and the state has to be there before it.
        last = max(last - size, 0)
    end = start + count
    if end < prefill_end:
        largest = state.config.token_budget
        if state.config.long_prefill_token_threshold > 0:
            largest = min(largest, state.config.long_prefill_token_threshold)
        aligned_end = end - end % size
        # A block that no chunk can ever fill is computed in unaligned pieces; so is, except in
        # vLLM, one that the budget left over does not fill.
        fills_later = size <= largest and state.config.quirks.aligned_split_starves
        if aligned_end > start or fills_later:
            end = aligned_end
    stops = [last]
    if start % size:
        stops.append(start + size - start % size)
    if cache.fine:
        tail = num_prompt - num_prompt % cache.hash_block_size
        if last < tail < num_prompt:
            stops.append(tail)
    shared = int(requests.shared_prefix[slot])
    if start < shared < end:
        stops.append(start + (shared - start) // size * size)
    end = min((stop for stop in stops if start < stop < end), default=end)
    return max(end - start, 0)
