"""Plans without a scheduler, as plain data: what the worker's batch is told step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from servespec.reference.contracts import SchedulerOutput

__all__ = ["PlannedStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a worker.

    Attributes
    ----------
    output : SchedulerOutput
        The plan.
    sampled : mapping of str to tuple of int
        Tokens that each request keeps at the end of the step; one whose tokens are computed and
        thrown away has no entry.
    """

    output: SchedulerOutput
    sampled: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
