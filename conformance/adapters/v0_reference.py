"""The reference's V0 scheduler behind the adapter protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceSample,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0Snapshot,
)
from servespec.reference.scheduling import v0

__all__ = ["ReferenceV0Scheduler"]


class ReferenceV0Scheduler:
    """`servespec.reference.scheduling.v0` with its state kept in `state`.

    Parameters
    ----------
    scheduler : V0SchedulerConfig
    cache : V0CacheConfig
    """

    def __init__(self, scheduler: V0SchedulerConfig, cache: V0CacheConfig) -> None:
        self.state = v0.initial_state(scheduler, cache)

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request."""
        self.state = v0.add_seq_group(self.state, request)

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""
        self.state = v0.abort_seq_group(self.state, request_ids)

    def schedule(self, now: float) -> V0SchedulerOutput:
        """Plan one step."""
        self.state, output = v0.schedule(self.state, now)
        return output

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Take in the samples."""
        self.state, outputs = v0.update_from_output(self.state, output, sampled)
        return outputs

    def snapshot(self) -> V0Snapshot:
        """Return the state as far as checks compare it."""
        return v0.snapshot(self.state)
