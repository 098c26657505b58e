"""What an implementation offers to be checked.

An implementation is any object with a `name` and some of the factories below; suites whose
factory is missing are left out and said to be. `servespec check --impl package.module:object`
imports such an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import (
    BatchRecord,
    CacheConfig,
    EngineConfig,
    EngineCoreOutput,
    ModelConfig,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
    StateMove,
    StepRecord,
)

__all__ = [
    "BatchFactory",
    "BatchUnderTest",
    "EngineFactory",
    "EngineUnderTest",
    "SchedulerFactory",
    "SchedulerUnderTest",
    "StateSaving",
    "Weights",
]

Weights = Mapping[str, npt.NDArray[np.float32]]
"""Parameters by their Hugging Face checkpoint names."""


class SchedulerUnderTest(Protocol):
    """A scheduler on mutable state, driven without a model."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens sampled for every scheduled request; () for a row still prefilling."""

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens for the next step."""

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside; ids that are not alive are ignored."""

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes; False if blocks in use forbid it."""

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""


class BatchUnderTest(Protocol):
    """The worker's persistent batch, driven by schedules without a model."""

    def prepare(self, output: SchedulerOutput) -> BatchRecord | None:
        """Update the rows, reorder them, and make inputs and metadata of one step.

        A step without tokens only drops the rows that ended, and gives None.
        """

    def append_sampled(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Take in the tokens that rows of the last step keep."""


@runtime_checkable
class StateSaving(Protocol):
    """What a batch may offer beside: the copies of aligned states that follow a step."""

    def state_saves(
        self, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[StateMove, ...], ...]:
        """Return the copies of each GDN group to make before `append_sampled`.

        Nothing at all where states are not aligned.
        """


class EngineUnderTest(Protocol):
    """A scheduler, a batch and a model together."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def step(self, forced_token_ids: Mapping[str, tuple[int, ...]] | None = None) -> StepRecord:
        """Run one step.

        With `forced_token_ids` the bookkeeping continues from those tokens, while the record's
        `sampled_token_ids` still names the engine's own choice: so a tie does not end the
        comparison. Requests that keep no token in this step are not looked at.
        """

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits or runs."""

    def snapshot(self) -> SchedulerSnapshot:
        """Return the scheduler's state as far as checks compare it."""


class SchedulerFactory(Protocol):
    """An implementation that can be asked for a scheduler."""

    name: str

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> SchedulerUnderTest:
        """Return a fresh scheduler."""


class BatchFactory(Protocol):
    """An implementation that can be asked for a persistent batch."""

    name: str

    def make_batch(self, config: EngineConfig) -> BatchUnderTest:
        """Return an empty batch."""


class EngineFactory(Protocol):
    """An implementation that can be asked for an engine."""

    name: str

    def make_engine(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, dtype: str = "float32"
    ) -> EngineUnderTest:
        """Return a fresh engine on the given weights; `dtype` is ``float32`` or ``bfloat16``."""
