"""A workload of the legacy V0 scheduler, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from servespec.conformance.workloads.workload import Workload
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    KVCacheGroup,
    SchedulerConfig,
    require,
)
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    V0CacheConfig,
    V0SchedulerConfig,
)

__all__ = ["NO_ENGINE", "NO_WORKLOAD", "START", "V0Case", "V0Step", "V0Workload"]

START = 1000.0
"""Seconds on the clock when a workload begins, unless it says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V0Step:
    """What happens before one step is planned.

    Attributes
    ----------
    elapsed : float
        Seconds since the step before.
    add : tuple of SequenceGroupRequest
    abort : tuple of str
        Ids aborted together.
    """

    elapsed: float = 1.0
    add: tuple[SequenceGroupRequest, ...] = ()
    abort: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.elapsed >= 0.0, "V0Step.elapsed", self.elapsed, "at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class V0Workload:
    """Steps with events, followed by steps without any until all requests ended.

    Attributes
    ----------
    steps : tuple of V0Step
    start : float
        Seconds on the clock before the first step.
    max_steps : int
        Steps after which a run ends in any case.
    token_seed : int
        Samples are a pure function of it, the request and how often the request sampled.
    num_token_ids : int
        Samples are below this number.
    churn : float
        How often, in [0, 1], a beam search drops beams, some of them for forks of others; other
        groups do so five times less often.
    """

    steps: tuple[V0Step, ...]
    start: float = START
    max_steps: int = 200
    token_seed: int = 0
    num_token_ids: int = 50
    churn: float = 0.3

    def __post_init__(self) -> None:
        name = "V0Workload"
        require(self.max_steps >= 1, f"{name}.max_steps", self.max_steps, "at least 1")
        require(self.num_token_ids >= 2, f"{name}.num_token_ids", self.num_token_ids, "at least 2")
        require(0.0 <= self.churn <= 1.0, f"{name}.churn", self.churn, "in [0, 1]")

    @property
    def requests(self) -> tuple[SequenceGroupRequest, ...]:
        """All requests in order of arrival."""
        return tuple(request for step in self.steps for request in step.add)


@dataclass(frozen=True, slots=True, kw_only=True)
class V0Case:
    """A V0 scheduler and what is done to it."""

    scheduler: V0SchedulerConfig
    cache: V0CacheConfig
    workload: V0Workload


NO_ENGINE = EngineConfig(
    scheduler=SchedulerConfig(),
    cache=CacheConfig(
        num_gpu_blocks=2,
        groups=(KVCacheGroup(layer_type="full_attention", layer_indices=(0,)),),
    ),
)
"""Stands where a case of another suite has the configuration of its engine."""

NO_WORKLOAD = Workload(steps=())
"""Stands where a case of another suite has its workload."""
