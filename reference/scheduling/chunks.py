"""How many tokens of a request go into a step, before blocks are looked for.

There is no prefill phase and no decode phase: a request has known tokens (and drafts) that are not
computed yet, and gets as many of them as limits allow. The letters are those of `RequestState`.

Source: ``Scheduler.schedule`` and ``_mamba_block_aligned_split`` of
``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from servespec.reference.scheduling.state import RequestState, SchedulerState

__all__ = ["aligned_split", "is_beyond_max_tokens", "running_chunk", "under_threshold"]


def is_beyond_max_tokens(request: RequestState) -> bool:
    """Whether the steps in flight reach `max_tokens` even if all their drafts are rejected.

    Of the H placeholders one is a token that is sure to come, while the others may be drafts: so
    C - (H - 1) tokens are computed for certain, and the length will be one more.
    """
    placeholders = request.num_output_placeholders
    return placeholders > 0 and (
        request.num_computed_tokens + 2 - placeholders
        >= request.num_prompt_tokens + request.request.sampling_params.max_tokens
    )


def under_threshold(state: SchedulerState, num_tokens: int) -> int:
    """Limit a chunk to ``long_prefill_token_threshold``, if that is set."""
    threshold = state.config.long_prefill_token_threshold
    return min(num_tokens, threshold) if threshold > 0 else num_tokens


def running_chunk(state: SchedulerState, request: RequestState, budget: int) -> int:
    """Return the tokens a running request would get: N + S + H - C, within the limits.

    The input position stays below ``max_model_len``, one token short of it, since a step with
    drafts might otherwise run beyond. The result can be negative for a request that was admitted
    with padding up to that length.

    Parameters
    ----------
    state : SchedulerState
    request : RequestState
    budget : int
        Tokens left in the step.
    """
    computed = request.num_computed_tokens
    wanted = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
    chunk = min(
        under_threshold(state, wanted - computed),
        budget,
        state.config.max_model_len - computed - 1,
    )
    return aligned_split(state, request, computed, chunk)


def aligned_split(
    state: SchedulerState, request: RequestState, start: int, num_new_tokens: int
) -> int:
    """Cut a prefill chunk where GDN states can be kept (mode ``align``).

    A recurrent state is written at the end of a chunk and can be kept for others at a block
    boundary only. So while the prompt (or, after a preemption, all but the last known token) is
    not through, a chunk

    - ends at a block boundary, unless it ends the prefill, or is too short to reach one;
    - stops at the next boundary if it starts inside a block;
    - stops at the last boundary within the known tokens, whose state is the best to keep (one
      block earlier if the drafter costs a hit its last block);
    - stops at the last hash unit of the prompt if hits may end inside blocks;
    - stops at the boundary before the end of a prefix that attention shares already.

    Parameters
    ----------
    state : SchedulerState
    request : RequestState
    start : int
        Tokens computed before the chunk, a prefix hit included.
    num_new_tokens : int
        The chunk before the cut.

    Returns
    -------
    int
        The chunk after the cut; 0 if the request has to wait for a larger budget.
    """
    layout = state.layout
    known, prompt = request.num_tokens, request.num_prompt_tokens
    prefill_end = max(prompt, known - 1)
    if not layout.is_aligned or start >= prefill_end:
        return num_new_tokens
    size = layout.block_size
    end = start + num_new_tokens
    if end < prefill_end:
        aligned = end // size * size
        largest = under_threshold(state, state.config.token_budget)
        waits = state.quirks.aligned_split_starves and size <= largest
        if aligned > start or waits:
            end = aligned

    last_boundary = known // size * size
    if layout.use_eagle:
        last_boundary = max(last_boundary - size, 0)
    stops = [last_boundary]
    if start % size:
        stops.append((start // size + 1) * size)
    if layout.is_fine:
        tail = prompt // layout.hash_block_size * layout.hash_block_size
        if last_boundary < tail < prompt:
            stops.append(tail)
    if start < request.shared_prefix_boundary < end:
        stops.append(start + (request.shared_prefix_boundary - start) // size * size)
    return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)
