"""The scheduler of vLLM's V1 engine as functions from one state to the next.

A step is ``schedule``, the worker's run, then ``update_from_output``; with drafts also
``update_draft_token_ids``. Under asynchronous scheduling the next ``schedule`` may come before the
``update_from_output`` of the step before, as long as outputs come in the order of the plans.

No function changes an argument: a state that was kept can be continued any number of times.

Source: ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py`` of vLLM 0.27.1, in the
output shape of its V1 model runner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from servespec.reference.cache import groups as caches
from servespec.reference.cache.layout import make_layout
from servespec.reference.cache.prefix import extend_hashes
from servespec.reference.contracts import (
    CacheConfig,
    DuplicateRequestError,
    EngineCoreOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
    require,
)
from servespec.reference.scheduling.plan import Plan, make_output
from servespec.reference.scheduling.preemption import preempted
from servespec.reference.scheduling.queues import append, prepend
from servespec.reference.scheduling.running import schedule_running
from servespec.reference.scheduling.state import RequestState, SchedulerState
from servespec.reference.scheduling.update import end_requests, update_drafts, update_outputs
from servespec.reference.scheduling.waiting import schedule_waiting

__all__ = [
    "add_request",
    "finish_requests",
    "has_finished_requests",
    "has_unfinished_requests",
    "initial_state",
    "reset_prefix_cache",
    "schedule",
    "set_pause_state",
    "snapshot",
    "update_draft_token_ids",
    "update_from_output",
]


def initial_state(
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    speculative_config: SpeculativeConfig | None = None,
) -> SchedulerState:
    """Return a scheduler without requests.

    Parameters
    ----------
    scheduler_config : SchedulerConfig
    cache_config : CacheConfig
    speculative_config : SpeculativeConfig or None

    Returns
    -------
    SchedulerState
    """
    layout = make_layout(scheduler_config, cache_config, speculative_config)
    return SchedulerState(
        config=scheduler_config,
        cache_config=cache_config,
        speculative_config=speculative_config,
        cache=caches.initial_cache(layout),
    )


def add_request(state: SchedulerState, request: Request) -> SchedulerState:
    """Queue a request.

    It is accepted even if it can never fit; `servespec.reference.scheduling.admission` tells.

    Parameters
    ----------
    state : SchedulerState
    request : Request

    Returns
    -------
    SchedulerState

    Raises
    ------
    DuplicateRequestError
        If a live request has the same id.
    """
    name = request.request_id
    if name in state.requests:
        raise DuplicateRequestError(f"request id {name!r} is in use by a live request")
    tokens = request.prompt_token_ids
    hashes: tuple[bytes, ...] = ()
    if state.layout.enable_caching:
        hashes = extend_hashes(hashes, request, tokens, state.layout.hash_block_size)
    entry = RequestState(request=request, all_token_ids=tokens, block_hashes=hashes)
    state = state.with_request(entry)
    queue = append(state.waiting, name, state.config.policy, state.requests)
    return replace(state, waiting=queue)


def schedule(
    state: SchedulerState, throttle_prefills: bool = False
) -> tuple[SchedulerState, SchedulerOutput]:
    """Plan one step: running requests first, then, unless one was preempted, waiting ones.

    Parameters
    ----------
    state : SchedulerState
    throttle_prefills : bool
        Data-parallel balancing: leave prefills to a later step, while decodes run and the last
        step that admitted any could take in all that waited.

    Returns
    -------
    state : SchedulerState
        As if the step had run and all its drafts had been accepted.
    output : SchedulerOutput
    """
    state = replace(state, cache=caches.new_step(state.cache))
    paused = state.pause_state is PauseState.PAUSED_ALL
    decodes = any(not state.requests[name].is_prefill_chunk for name in state.running)
    plan = Plan(
        budget=0 if paused else state.config.token_budget,
        defer_prefills=throttle_prefills and not state.prefill_capacity_bound and decodes,
    )
    state, plan = schedule_running(state, plan)
    if not plan.has_preempted and state.pause_state is PauseState.UNPAUSED:
        state, plan = schedule_waiting(state, plan)
    state, output = make_output(state, plan)
    return _advance(state, output), output


def _advance(state: SchedulerState, output: SchedulerOutput) -> SchedulerState:
    """Count the step's tokens as computed, so that the next step can be planned at once.

    Under asynchronous scheduling a row past its prompt will add a token and all its drafts, known
    only later: placeholders stand for them, and for the drafts of the step after.
    """
    requests = dict(state.requests)
    for name, num_tokens in output.num_scheduled_tokens.items():
        request = requests[name]
        computed = request.num_computed_tokens + num_tokens
        placeholders = request.num_output_placeholders
        is_chunk = computed < request.num_tokens + placeholders
        spec_token_ids = request.spec_token_ids
        if state.config.async_scheduling and not is_chunk:
            placeholders += 1 + len(output.scheduled_spec_decode_tokens.get(name, ()))
            spec_token_ids = (-1,) * output.num_spec_tokens_to_schedule
        requests[name] = replace(
            request,
            num_computed_tokens=computed,
            num_in_flight_tokens=request.num_in_flight_tokens + num_tokens,
            is_prefill_chunk=is_chunk,
            num_output_placeholders=placeholders,
            spec_token_ids=spec_token_ids,
        )
    return replace(
        state,
        requests=requests,
        finished_req_ids=frozenset(),
        preempted_req_ids=frozenset(),
        prev_step_req_ids=frozenset(output.num_scheduled_tokens),
    )


def update_from_output(
    state: SchedulerState, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
) -> tuple[SchedulerState, tuple[EngineCoreOutput, ...]]:
    """Take in the tokens of a step.

    Parameters
    ----------
    state : SchedulerState
    output : SchedulerOutput
        The plan of the step; plans come back in the order in which they were made.
    sampled : mapping of str to tuple of int
        For each scheduled request the accepted drafts and one token more; () or nothing for a row
        that has known tokens left to compute.

    Returns
    -------
    state : SchedulerState
    outputs : tuple of EngineCoreOutput
        One for each request that got tokens, in the order of the plan.

    Raises
    ------
    ConfigError
        If the plan schedules fewer than 1 token for a request.
    """
    return update_outputs(state, output, sampled)


def update_draft_token_ids(
    state: SchedulerState, drafts: Mapping[str, tuple[int, ...]]
) -> SchedulerState:
    """Take in draft tokens for the next step.

    Parameters
    ----------
    state : SchedulerState
    drafts : mapping of str to tuple of int
        Ids that are not alive are ignored; so are drafts of a request that has known tokens left
        to compute.

    Returns
    -------
    SchedulerState
    """
    return update_drafts(state, drafts)


def finish_requests(
    state: SchedulerState, request_ids: Sequence[str], status: RequestStatus
) -> SchedulerState:
    """End requests from outside.

    Parameters
    ----------
    state : SchedulerState
    request_ids : sequence of str
        In the order in which their blocks are freed; ids that are not alive are ignored. A string
        is one id.
    status : RequestStatus
        A finished one.

    Returns
    -------
    SchedulerState

    Raises
    ------
    ConfigError
        If `status` is not a finished one.
    """
    require(status.is_finished, "status", status.name, "a finished status")
    ids = (request_ids,) if isinstance(request_ids, str) else tuple(request_ids)
    if state.quirks.finish_in_set_order:
        ids = tuple(set(ids))
    requests, cache = dict(state.requests), state.cache
    ended = set()
    for name in ids:
        if requests.pop(name, None) is not None:
            cache = caches.free(cache, name)
            ended.add(name)
    return end_requests(replace(state, requests=requests, cache=cache), ended)


def set_pause_state(state: SchedulerState, pause: PauseState) -> SchedulerState:
    """Stop or resume admission (`PAUSED_NEW`) or everything (`PAUSED_ALL`)."""
    return replace(state, pause_state=pause)


def reset_prefix_cache(
    state: SchedulerState, reset_running_requests: bool = False
) -> tuple[SchedulerState, bool]:
    """Forget all prefix hashes, as after a change of weights.

    Parameters
    ----------
    state : SchedulerState
    reset_running_requests : bool
        Whether to preempt all running requests first, last admitted first so that they resume in
        order. Their output in flight is dropped.

    Returns
    -------
    state : SchedulerState
    done : bool
        False, with nothing forgotten, if requests hold blocks.
    """
    if reset_running_requests:
        requests, cache, waiting = dict(state.requests), state.cache, state.waiting
        for name in reversed(state.running):
            cache = caches.free(cache, name)
            requests[name] = preempted(requests[name], drop_stale_output=True)
            waiting = prepend(waiting, (name,), state.config.policy, requests)
        state = replace(
            state,
            requests=requests,
            cache=cache,
            running=(),
            waiting=waiting,
            preempted_req_ids=state.preempted_req_ids | set(state.running),
            prev_step_req_ids=frozenset(),
        )
    cache, done = caches.reset_prefix_cache(state.cache)
    return replace(state, cache=cache), done


def has_unfinished_requests(state: SchedulerState) -> bool:
    """Whether a step could do anything, now that the scheduler is paused or not."""
    if state.pause_state is PauseState.PAUSED_ALL:
        return False
    if state.pause_state is PauseState.PAUSED_NEW:
        return bool(state.running)
    return bool(state.running or state.waiting or state.skipped_waiting)


def has_finished_requests(state: SchedulerState) -> bool:
    """Whether requests ended of which the worker has not been told."""
    return bool(state.finished_req_ids)


def snapshot(state: SchedulerState) -> SchedulerSnapshot:
    """Return the state as far as checks compare it."""
    pool = state.cache.pool
    return SchedulerSnapshot(
        free_blocks=pool.free,
        ref_counts=pool.ref_counts,
        cached_blocks=frozenset(pool.hashes),
        block_tables={name: state.cache.block_table(name) for name in state.cache.tables},
        running=state.running,
        waiting=state.waiting,
        skipped_waiting=state.skipped_waiting,
        num_computed_tokens={
            name: request.num_computed_tokens for name, request in state.requests.items()
        },
        num_output_placeholders={
            name: request.num_output_placeholders for name, request in state.requests.items()
        },
        pause_state=state.pause_state,
    )
