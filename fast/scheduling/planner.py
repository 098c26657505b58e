"""The scheduler of an engine: V1, or the legacy V0 where the configuration asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from servespec.fast.scheduling.v0_engine import V0EngineScheduler
from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    EngineConfig,
    EngineCoreOutput,
    Request,
    RequestStatus,
    SchedulerSnapshot,
)

__all__ = ["Planner", "make_planner"]


class Planner(Protocol):
    """What an engine asks of its scheduler; a plan is handed back as it came."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def schedule(self) -> Any:
        """Return the plan of a step, whose `to_contract` is for the worker."""

    def update_from_output(
        self, schedule: Any, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens of a step."""

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request still waits or runs."""

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""


def make_planner(config: EngineConfig) -> Planner:
    """Return the scheduler that a configuration asks for."""
    if config.v0 is not None:
        return V0EngineScheduler(config, config.v0)
    return Scheduler(config.scheduler, config.cache)
