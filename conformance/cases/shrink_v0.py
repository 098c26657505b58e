"""Simpler variants of a V0 case, the greatest leaps first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from servespec.conformance.cases.pieces import pieces
from servespec.conformance.workloads.workload_v0 import V0Case, V0Step
from servespec.reference.contracts import SamplingParams
from servespec.reference.contracts.v0 import SequenceGroupRequest

__all__ = ["v0_changes"]

V0Change = Callable[[V0Case], V0Case]
StepChange = Callable[[V0Step], V0Step]
RequestChange = Callable[[SequenceGroupRequest], SequenceGroupRequest]


def v0_changes(case: V0Case, last: int | None) -> Iterator[V0Change]:
    """Yield changes that make a V0 case simpler; some may be refused by a configuration.

    Parameters
    ----------
    case : V0Case
    last : int or None
        The step that shows the failure: later ones are of no use.

    Yields
    ------
    callable
        From a case to a simpler one.
    """
    if last is not None:
        yield partial(_end_after, last=last)
    names = [request.request_id for request in case.workload.requests]
    for piece in pieces(len(names), len(names) // 2):
        yield partial(_without, names=frozenset(names[piece]))
    for index in range(len(case.workload.steps)):
        yield partial(_merge, index=index)
    yield partial(_map_steps, change=lambda step: replace(step, abort=()))
    yield partial(_map_steps, change=lambda step: replace(step, elapsed=1.0))
    for name in (None, *names):
        for change in (_plain, _alone, _half_prompt, _shorter_prompt, _half_output, _fewer_tokens):
            yield partial(_map_requests, change=change, only=name)
    yield lambda case: replace(case, workload=replace(case.workload, churn=0.0))
    plain: tuple[dict[str, Any], ...] = (
        {"delay_factor": 0.0},
        {"num_lookahead_slots": 0},
        {"preemption_mode": None},
        {"use_v2_block_manager": False, "num_lookahead_slots": 0},
    )
    for fields in plain:
        yield partial(_scheduler, fields=fields)
    yield lambda case: replace(case, cache=replace(case.cache, watermark=0.0))


def _scheduler(case: V0Case, fields: dict[str, Any]) -> V0Case:
    return replace(case, scheduler=replace(case.scheduler, **fields))


def _with_steps(case: V0Case, steps: tuple[V0Step, ...]) -> V0Case:
    return replace(case, workload=replace(case.workload, steps=steps))


def _end_after(case: V0Case, last: int) -> V0Case:
    most = min(case.workload.max_steps, last + 1)
    steps = case.workload.steps[: last + 1]
    return replace(case, workload=replace(case.workload, max_steps=most, steps=steps))


def _map_steps(case: V0Case, change: StepChange) -> V0Case:
    return _with_steps(case, tuple(map(change, case.workload.steps)))


def _without(case: V0Case, names: frozenset[str]) -> V0Case:
    def change(step: V0Step) -> V0Step:
        return replace(
            step,
            add=tuple(r for r in step.add if r.request_id not in names),
            abort=tuple(name for name in step.abort if name not in names),
        )

    return _map_steps(case, change)


def _merge(case: V0Case, index: int) -> V0Case:
    """Let what happens before a step happen before the one ahead of it."""
    steps = case.workload.steps
    if index == 0:
        return case
    before, step = steps[index - 1], steps[index]
    merged = V0Step(
        elapsed=before.elapsed + step.elapsed,
        add=before.add + step.add,
        abort=before.abort + step.abort,
    )
    return _with_steps(case, (*steps[: index - 1], merged, *steps[index + 1 :]))


def _map_requests(case: V0Case, change: RequestChange, only: str | None) -> V0Case:
    def changed(request: SequenceGroupRequest) -> SequenceGroupRequest:
        return change(request) if only in (None, request.request_id) else request

    return _map_steps(case, lambda step: replace(step, add=tuple(map(changed, step.add))))


def _plain(request: SequenceGroupRequest) -> SequenceGroupRequest:
    params = SamplingParams(max_tokens=request.sampling_params.max_tokens)
    return replace(request, sampling_params=params, use_beam_search=False)


def _alone(request: SequenceGroupRequest) -> SequenceGroupRequest:
    return replace(request, best_of=1, use_beam_search=False)


def _prompt_to(request: SequenceGroupRequest, length: int) -> SequenceGroupRequest:
    return replace(request, prompt_token_ids=request.prompt_token_ids[: max(1, length)])


def _half_prompt(request: SequenceGroupRequest) -> SequenceGroupRequest:
    return _prompt_to(request, len(request.prompt_token_ids) // 2)


def _shorter_prompt(request: SequenceGroupRequest) -> SequenceGroupRequest:
    return _prompt_to(request, len(request.prompt_token_ids) - 1)


def _output_to(request: SequenceGroupRequest, length: int) -> SequenceGroupRequest:
    most = max(1, length)
    params = request.sampling_params
    least = min(most, params.min_tokens)
    return replace(request, sampling_params=replace(params, max_tokens=most, min_tokens=least))


def _half_output(request: SequenceGroupRequest) -> SequenceGroupRequest:
    return _output_to(request, request.sampling_params.max_tokens // 2)


def _fewer_tokens(request: SequenceGroupRequest) -> SequenceGroupRequest:
    return _output_to(request, request.sampling_params.max_tokens - 1)
