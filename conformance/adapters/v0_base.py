"""What an implementation of the legacy V0 scheduler offers to be checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceSample,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0Snapshot,
)

__all__ = ["V0SchedulerFactory", "V0SchedulerUnderTest"]


class V0SchedulerUnderTest(Protocol):
    """A V0 scheduler on mutable state, driven without a model."""

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request; its prompt becomes the next sequence."""

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside; ids that are not queued are ignored."""

    def schedule(self, now: float) -> V0SchedulerOutput:
        """Plan one step; raises `V0SchedulingError` where V0 gives up."""

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Take in the samples of every scheduled group that was to sample."""

    def snapshot(self) -> V0Snapshot:
        """Return the state as far as checks compare it."""


class V0SchedulerFactory(Protocol):
    """An implementation that can be asked for a V0 scheduler."""

    name: str

    def make_v0_scheduler(
        self, scheduler: V0SchedulerConfig, cache: V0CacheConfig
    ) -> V0SchedulerUnderTest:
        """Return a fresh scheduler."""
