"""What comes back from the worker: sampled tokens, and drafts for the next step.

Source: ``Scheduler.update_from_output``, ``update_draft_token_ids`` and the overrides of
``AsyncScheduler`` in ``vllm/v1/core/sched``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from servespec.reference.cache import groups as caches
from servespec.reference.cache.prefix import extend_hashes
from servespec.reference.contracts import (
    EngineCoreOutput,
    RequestStatus,
    SchedulerOutput,
    require,
)
from servespec.reference.scheduling.queues import without
from servespec.reference.scheduling.state import RequestState, SchedulerState
from servespec.reference.scheduling.stop import check_stop

__all__ = ["append_tokens", "end_requests", "settle", "update_drafts", "update_outputs"]


def update_outputs(
    state: SchedulerState, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
) -> tuple[SchedulerState, tuple[EngineCoreOutput, ...]]:
    """Take in the tokens of one step, request by request in the order of the plan.

    A request that stops gives its blocks back at once, so blocks are freed in that order too.
    Requests that ended meanwhile are passed over. See `servespec.reference.scheduling.v1` for the
    parameters.
    """
    requests, cache = dict(state.requests), state.cache
    outputs: list[EngineCoreOutput] = []
    stopped: set[str] = set()
    for name, num_scheduled in output.num_scheduled_tokens.items():
        require(num_scheduled > 0, f"num_scheduled_tokens[{name!r}]", num_scheduled, "at least 1")
        if name not in requests:
            continue
        request = requests[name]
        is_stale = request.num_stale_output_tokens > 0
        request = replace(
            request,
            num_in_flight_tokens=request.num_in_flight_tokens - num_scheduled,
            num_stale_output_tokens=request.num_stale_output_tokens
            - (num_scheduled if is_stale else 0),
        )
        tokens = sampled.get(name, ())
        if (is_stale and request.drop_stale_output) or not tokens:
            requests[name] = request
            continue

        was_running = request.status is RequestStatus.RUNNING
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        request = settle(request, drafts - (len(tokens) - 1) if drafts else 0)
        request, kept = append_tokens(state, request, tokens)
        if state.config.async_scheduling:
            if not is_stale:
                request = replace(
                    request,
                    num_output_placeholders=request.num_output_placeholders - len(kept),
                )
            if was_running:
                done = request.num_computed_tokens - request.num_output_placeholders
                cache = caches.cache_blocks(cache, request, done, ends_chunk=False)
        if request.status.is_finished:
            cache = caches.free(cache, name)
            del requests[name]
            stopped.add(name)
        else:
            requests[name] = request
        outputs.append(
            EngineCoreOutput(
                request_id=name,
                new_token_ids=kept,
                finish_reason=request.status.finish_reason,
                stop_reason=request.stop_reason,
            )
        )
    return end_requests(replace(state, requests=requests, cache=cache), stopped), tuple(outputs)


def settle(request: RequestState, num_rejected: int) -> RequestState:
    """Take rejected drafts off the counters that were advanced as if all were accepted.

    A preemption has set the counters to 0, where stale output finds and leaves them.
    """
    if num_rejected == 0:
        return request
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    return replace(
        request,
        num_computed_tokens=computed - (num_rejected if computed > 0 else 0),
        num_output_placeholders=placeholders - (num_rejected if placeholders > 0 else 0),
    )


def append_tokens(
    state: SchedulerState, request: RequestState, tokens: tuple[int, ...]
) -> tuple[RequestState, tuple[int, ...]]:
    """Append tokens one by one until one stops the request; return those appended."""
    for count, token in enumerate(tokens, 1):
        known = (*request.all_token_ids, token)
        hashes = request.block_hashes
        if state.layout.enable_caching:
            unit = state.layout.hash_block_size
            hashes = extend_hashes(hashes, request.request, known, unit)
        request = replace(request, all_token_ids=known, block_hashes=hashes)
        request = check_stop(
            request, state.config.max_model_len, state.quirks.min_tokens_outlive_model_len
        )
        if request.status.is_finished:
            return request, tokens[:count]
    return request, tokens


def end_requests(state: SchedulerState, request_ids: set[str]) -> SchedulerState:
    """Take ended requests out of all queues and report them to the worker with the next plan."""
    if not request_ids:
        return state
    return replace(
        state,
        running=without(state.running, request_ids),
        waiting=without(state.waiting, request_ids),
        skipped_waiting=without(state.skipped_waiting, request_ids),
        finished_req_ids=state.finished_req_ids | request_ids,
    )


def update_drafts(state: SchedulerState, drafts: Mapping[str, tuple[int, ...]]) -> SchedulerState:
    """Take in drafts; a request in the middle of its prompt, or ended, gets none."""
    requests = dict(state.requests)
    for name, tokens in drafts.items():
        if name in requests:
            kept = () if requests[name].is_prefill_chunk else tuple(tokens)
            requests[name] = replace(requests[name], spec_token_ids=kept)
    return replace(state, requests=requests)
