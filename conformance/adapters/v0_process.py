"""The checker's end of the line protocol for implementations of the V0 scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servespec.conformance.adapters import v0_protocol
from servespec.conformance.adapters.process import LineProcess, Peer, RemoteScheduler
from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceSample,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0SchedulingError,
    V0Snapshot,
)

__all__ = ["V0ProcessImplementation", "V0ProcessScheduler"]


class V0ProcessScheduler(RemoteScheduler[V0Snapshot]):
    """A V0 scheduler behind the line protocol, used like any other.

    Parameters
    ----------
    process : LineProcess
    handle : int
    scheduler, cache
        Configurations.
    """

    def __init__(
        self,
        process: LineProcess,
        handle: int,
        scheduler: V0SchedulerConfig,
        cache: V0CacheConfig,
    ) -> None:
        opening = v0_protocol.OpenV0(scheduler, cache)
        super().__init__(process, handle, opening, v0_protocol.SnapshotV0(), V0Snapshot)
        self._known: set[str] = set()

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request."""
        self._known.add(request.request_id)
        self._later(v0_protocol.AddSeqGroup(request))

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""
        self._later(v0_protocol.AbortSeqGroup(tuple(request_ids)))

    def schedule(self, now: float) -> V0SchedulerOutput:
        """Plan one step."""
        plan = self._now(v0_protocol.ScheduleV0(now), v0_protocol.V0Plan)
        if plan.rule is not None:
            raise V0SchedulingError(plan.rule, plan.detail[:400])
        if plan.output is None:
            raise self._process.failed("answered schedule_v0 with neither a plan nor a rule")
        for group in plan.output.scheduled_seq_groups:
            if group.request_id not in self._known:
                raise self._process.failed(
                    f"scheduled an unknown request {group.request_id[:80]!r}"
                )
        return plan.output

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Take in the samples of the step planned last."""
        return self._now(
            v0_protocol.UpdateV0FromOutput(dict(sampled)), tuple[SequenceGroupOutput, ...]
        )


class V0ProcessImplementation(Peer):
    """An implementation whose V0 schedulers live in one child process; parameters as for `Peer`."""

    def make_v0_scheduler(
        self, scheduler: V0SchedulerConfig, cache: V0CacheConfig
    ) -> V0ProcessScheduler:
        """Return a fresh scheduler, in a fresh process if the last one failed."""
        return self.open(
            lambda process, handle: V0ProcessScheduler(process, handle, scheduler, cache)
        )
