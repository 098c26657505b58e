"""The scheduler of an engine: V1, or the legacy V0 where the configuration asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servespec.reference.contracts import (
    EngineConfig,
    EngineCoreOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerSnapshot,
)
from servespec.reference.scheduling import v0_engine, v1
from servespec.reference.scheduling.state import SchedulerState
from servespec.reference.scheduling.v0_engine import V0EngineState

__all__ = [
    "PlannerState",
    "abort_requests",
    "add_request",
    "has_unfinished_requests",
    "initial_state",
    "schedule",
    "snapshot",
    "update_from_output",
]

PlannerState = SchedulerState | V0EngineState


def initial_state(config: EngineConfig) -> PlannerState:
    """Return a scheduler without requests."""
    if config.v0 is not None:
        return v0_engine.initial_state(config, config.v0)
    return v1.initial_state(config.scheduler, config.cache)


def add_request(state: PlannerState, request: Request) -> PlannerState:
    """Queue a request."""
    if isinstance(state, V0EngineState):
        return v0_engine.add_request(state, request)
    return v1.add_request(state, request)


def schedule(state: PlannerState) -> tuple[PlannerState, SchedulerOutput]:
    """Plan one step."""
    if isinstance(state, V0EngineState):
        return v0_engine.schedule(state)
    return v1.schedule(state)


def update_from_output(
    state: PlannerState, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
) -> tuple[PlannerState, tuple[EngineCoreOutput, ...]]:
    """Take in the tokens of a step."""
    if isinstance(state, V0EngineState):
        return v0_engine.update_from_output(state, output, sampled)
    return v1.update_from_output(state, output, sampled)


def abort_requests(state: PlannerState, request_ids: Sequence[str]) -> PlannerState:
    """End requests from outside; ids that are not alive are ignored."""
    if isinstance(state, V0EngineState):
        return v0_engine.abort_requests(state, request_ids)
    return v1.finish_requests(state, request_ids, RequestStatus.FINISHED_ABORTED)


def has_unfinished_requests(state: PlannerState) -> bool:
    """Tell whether any request still waits or runs."""
    if isinstance(state, V0EngineState):
        return v0_engine.has_unfinished_requests(state)
    return v1.has_unfinished_requests(state)


def snapshot(state: PlannerState) -> SchedulerSnapshot:
    """Return the state as far as checks compare it."""
    if isinstance(state, V0EngineState):
        return v0_engine.snapshot(state)
    return v1.snapshot(state)
