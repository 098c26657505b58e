"""Making a failing case small, within a time limit.

Candidates are typed cases, smaller or simpler than the one at hand; one that still fails in the
same suite at the same field replaces it. The order tries what removes most first: steps and
requests, then events, then tokens, then configuration, then layers. Hypothesis shrinks too, but
over its own byte stream and inside one test function; a case from a file has no such stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from servespec.conformance.cases.case import Case
from servespec.conformance.cases.pieces import pieces
from servespec.conformance.cases.shrink_attention import attention_changes
from servespec.conformance.cases.shrink_kernels import kernel_changes
from servespec.conformance.cases.shrink_plans import Plans, plan_changes, without_group
from servespec.conformance.cases.shrink_v0 import v0_changes
from servespec.conformance.verdicts import CaseResult
from servespec.conformance.workloads.kernels import KernelCase
from servespec.conformance.workloads.workload import WorkloadStep
from servespec.conformance.workloads.workload_attention import AttentionCase
from servespec.conformance.workloads.workload_v0 import V0Case
from servespec.reference.contracts import (
    LayerType,
    Quirks,
    Request,
    SamplingParams,
    gdn_groups_first,
)

__all__ = ["Shrunk", "same_failure", "shrink", "simpler"]

Change = Callable[[Case], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A small failing case.

    Attributes
    ----------
    case : Case
    result : CaseResult
        Of running `case`.
    tried : int
        Candidates run.
    """

    case: Case
    result: CaseResult
    tried: int


def same_failure(a: CaseResult, b: CaseResult) -> bool:
    """Whether two results fail at the same place: the same field, whichever step or request."""
    if a.divergence is None or b.divergence is None:
        return False
    return a.divergence.place == b.divergence.place and a.divergence.failed == b.divergence.failed


def shrink(
    case: Case,
    result: CaseResult,
    run: Callable[[Case], CaseResult],
    *,
    seconds: float,
    progress: Callable[[int], None] | None = None,
) -> Shrunk:
    """Return a case that fails as `case` does and that, given time, no one change makes simpler.

    Parameters
    ----------
    case : Case
    result : CaseResult
        Of `case`, with a divergence.
    run : callable
        Runs a case.
    seconds : float
        After this time the simplest case so far is returned.
    progress : callable, optional
        Told the number of candidates tried.
    """
    deadline = time.monotonic() + seconds
    tried = 0
    improved = True
    while improved:
        improved = False
        index = 0
        candidates = list(simpler(case, result))
        while index < len(candidates) and time.monotonic() < deadline:
            tried += 1
            if progress is not None:
                progress(tried)
            outcome = run(candidates[index])
            if same_failure(result, outcome):
                case, result, improved = candidates[index], outcome, True
                # Go on from here: what did not help before seldom helps at once.
                candidates = list(simpler(case, result))
            else:
                index += 1
    return Shrunk(case=case, result=result, tried=tried)


def simpler(case: Case, result: CaseResult) -> Iterator[Case]:
    """Yield cases simpler than `case`, the greatest leaps first.

    Parameters
    ----------
    case : Case
    result : CaseResult
        Of `case`: steps after its divergence are of no use.

    Yields
    ------
    Case
        Valid ones only: a change that a configuration refuses is left out.
    """
    for change in _changes(case, result):
        try:
            candidate = change(case)
        except ValueError:
            continue
        if candidate != case:
            yield candidate


def _changes(case: Case, result: CaseResult) -> Iterator[Change]:
    last = result.divergence.step if result.divergence is not None else None
    if case.kernel is not None:
        for change_kernel in kernel_changes(case.kernel):
            yield partial(_change_kernel, change=change_kernel)
        return
    if case.v0 is not None:
        for change in v0_changes(case.v0, last):
            yield partial(_change_v0, change=change)
        return
    if case.attention is not None:
        for change_attention in attention_changes(case.attention, last):
            yield partial(_change_attention, change=change_attention)
        yield partial(replace, dtype="float32")
        return
    if case.plans is not None:
        for change_plans in plan_changes(case.plans, last):
            yield partial(_change_plans, change=change_plans)
        for index in range(len(case.config.cache.groups)):
            yield partial(_without_group, index=index)
        yield from _plainer_configuration(case)
        return
    if last is not None:
        yield partial(_end_after, last=last)
    yield from _drop_requests(case)
    for index in range(len(case.workload.steps)):
        yield partial(_merge_step, index=index)
    for event in ({"abort": ()}, {"pause": None}, {"reset_prefix_cache": None}):
        yield partial(_map_steps, change=partial(replace, **event))
    yield partial(_map_steps, change=partial(replace, throttle_prefills=False))
    for name in (None, *(r.request_id for r in case.workload.requests)):
        for on_request in (_plain, _half_prompt, _half_output, _cut_prompt, _cut_output):
            yield partial(_map_requests, change=on_request, only=name)
    yield from _plainer_configuration(case)
    yield from _smaller_model(case)


def _change_kernel(case: Case, change: Callable[[KernelCase], KernelCase]) -> Case:
    return case if case.kernel is None else replace(case, kernel=change(case.kernel))


def _change_v0(case: Case, change: Callable[[V0Case], V0Case]) -> Case:
    return case if case.v0 is None else replace(case, v0=change(case.v0))


def _change_plans(case: Case, change: Callable[[Plans], Plans]) -> Case:
    return case if case.plans is None else replace(case, plans=change(case.plans))


def _change_attention(case: Case, change: Callable[[AttentionCase], AttentionCase]) -> Case:
    return case if case.attention is None else replace(case, attention=change(case.attention))


def _without_group(case: Case, index: int) -> Case:
    groups = case.config.cache.groups
    case = _change_plans(case, partial(without_group, index=index))
    return _with_cache(case, groups=groups[:index] + groups[index + 1 :])


def _with_steps(case: Case, steps: tuple[WorkloadStep, ...]) -> Case:
    return replace(case, workload=replace(case.workload, steps=steps))


def _map_steps(case: Case, change: Callable[[WorkloadStep], WorkloadStep]) -> Case:
    return _with_steps(case, tuple(map(change, case.workload.steps)))


def _end_after(case: Case, last: int) -> Case:
    most = min(case.workload.max_steps, last + 1)
    steps = case.workload.steps[: last + 1]
    return replace(case, workload=replace(case.workload, max_steps=most, steps=steps))


def _merge_step(case: Case, index: int) -> Case:
    """Drop an empty step, or let its events happen one step earlier."""
    steps = case.workload.steps
    if steps[index] == WorkloadStep():
        return _with_steps(case, (*steps[:index], *steps[index + 1 :]))
    if index == 0:
        return case
    before, step = steps[index - 1], steps[index]
    merged = WorkloadStep(
        add=before.add + step.add,
        abort=before.abort + step.abort,
        pause=before.pause if step.pause is None else step.pause,
        reset_prefix_cache=step.reset_prefix_cache or before.reset_prefix_cache,
        throttle_prefills=step.throttle_prefills or before.throttle_prefills,
    )
    return _with_steps(case, (*steps[: index - 1], merged, *steps[index + 1 :]))


def _drop_requests(case: Case) -> Iterator[Change]:
    names = tuple(dict.fromkeys(r.request_id for r in case.workload.requests))
    for piece in pieces(len(names), len(names) // 2):
        yield partial(_without_requests, names=frozenset(names[piece]))


def _without_requests(case: Case, names: frozenset[str]) -> Case:
    def change(step: WorkloadStep) -> WorkloadStep:
        return replace(
            step,
            add=tuple(r for r in step.add if r.request_id not in names),
            abort=tuple(name for name in step.abort if name not in names),
        )

    return _map_steps(case, change)


def _map_requests(case: Case, change: Callable[[Request], Request], only: str | None) -> Case:
    def changed(request: Request) -> Request:
        return change(request) if only in (None, request.request_id) else request

    return _map_steps(case, lambda step: replace(step, add=tuple(map(changed, step.add))))


def _plain(request: Request) -> Request:
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=SamplingParams(max_tokens=request.sampling_params.max_tokens),
    )


def _prompt_to(request: Request, length: int) -> Request:
    return replace(request, prompt_token_ids=request.prompt_token_ids[: max(1, length)])


def _half_prompt(request: Request) -> Request:
    return _prompt_to(request, request.num_prompt_tokens // 2)


def _cut_prompt(request: Request) -> Request:
    return _prompt_to(request, request.num_prompt_tokens - 1)


def _output_to(request: Request, length: int) -> Request:
    most = max(1, length)
    least = min(most, request.sampling_params.min_tokens)
    params = replace(request.sampling_params, max_tokens=most, min_tokens=least)
    return replace(request, sampling_params=params)


def _half_output(request: Request) -> Request:
    return _output_to(request, request.sampling_params.max_tokens // 2)


def _cut_output(request: Request) -> Request:
    return _output_to(request, request.sampling_params.max_tokens - 1)


def _plainer_configuration(case: Case) -> Iterator[Change]:
    yield lambda case: replace(case, config=replace(case.config, speculative=None))
    yield lambda case: replace(case, config=replace(case.config, graph=None))
    scheduler, cache = case.config.scheduler, case.config.cache
    plain: tuple[dict[str, Any], ...] = (
        {"async_scheduling": False},
        {"policy": "fcfs"},
        {"long_prefill_token_threshold": 0},
        {"watermark": 0.0},
        {"prefill_schedule_interval": 1},
        {"quirks": Quirks()},
        {"scheduler_reserve_full_isl": True},
        {"enable_chunked_prefill": True},
        {"max_num_scheduled_tokens": None},
        {"max_num_batched_tokens": max(64, scheduler.max_num_batched_tokens)},
    )
    for changes in plain:
        yield partial(_with_scheduler, **changes)
    plain = (
        {"prefix_match_unit": None},
        {"kernel_block_size": None},
        {"enable_prefix_caching": False, "mamba_cache_mode": "none"},
        {"num_gpu_blocks": max(64, cache.num_gpu_blocks)},
    )
    for changes in plain:
        yield partial(_with_cache, **changes)


def _with_scheduler(case: Case, **changes: Any) -> Case:
    scheduler = replace(case.config.scheduler, **changes)
    return replace(case, config=replace(case.config, scheduler=scheduler))


def _with_cache(case: Case, **changes: Any) -> Case:
    return replace(case, config=replace(case.config, cache=replace(case.config.cache, **changes)))


def _smaller_model(case: Case) -> Iterator[Change]:
    if case.model is None:
        return
    layers = case.model.config.layer_types
    yield partial(_with_layers, layers=layers, seed=0)
    for index in range(len(layers)):
        fewer = layers[:index] + layers[index + 1 :]
        yield partial(_with_layers, layers=fewer, seed=case.model.seed)


def _with_layers(case: Case, layers: tuple[LayerType, ...], seed: int) -> Case:
    if case.model is None or not layers:
        return case
    model = replace(case.model, config=replace(case.model.config, layer_types=layers), seed=seed)
    return _with_cache(replace(case, model=model), groups=gdn_groups_first(layers))
