"""Recorded traces of V0 schedulers, for machines that do not have the one recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.traces import read_recordings, write_traces
from servespec.conformance.adapters.v0_base import V0SchedulerFactory
from servespec.conformance.adapters.v0_protocol import V0Plan
from servespec.conformance.workloads.driver_v0 import drive_v0
from servespec.conformance.workloads.scheduling_v0 import make_v0_case, v0_matrix
from servespec.conformance.workloads.workload_v0 import V0Case
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

__all__ = [
    "V0RecordedStep",
    "V0Recording",
    "V0TraceImplementation",
    "read_v0_traces",
    "record_v0_case",
    "record_v0_matrix",
]


class V0RecordedStep(msgspec.Struct, frozen=True):
    """What one step was answered.

    Attributes
    ----------
    plan : V0Plan
    planned, after : V0Snapshot
        The state after the plan and after its samples.
    outputs : tuple of SequenceGroupOutput
    """

    plan: V0Plan
    planned: V0Snapshot
    after: V0Snapshot
    outputs: tuple[SequenceGroupOutput, ...] = ()


class V0Recording(msgspec.Struct, frozen=True):
    """One case and what was answered.

    Attributes
    ----------
    implementation : str
        Name and version of who answered.
    case : V0Case
    steps : tuple of V0RecordedStep
    """

    implementation: str
    case: V0Case
    steps: tuple[V0RecordedStep, ...]


class _V0TraceScheduler:
    """Answers from a recording to whoever makes the recorded calls."""

    def __init__(self, recording: V0Recording) -> None:
        self._steps = iter(recording.steps)
        self._step: V0RecordedStep | None = None
        self._updated = False

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request."""

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""

    def schedule(self, now: float) -> V0SchedulerOutput:
        """Return the next plan, or give up as recorded."""
        self._step, self._updated = next(self._steps, None), False
        plan = self._recorded().plan
        if plan.output is None:
            assert plan.rule is not None
            raise V0SchedulingError(plan.rule, plan.detail)
        return plan.output

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Return what the samples gave."""
        self._updated = True
        return self._recorded().outputs

    def snapshot(self) -> V0Snapshot:
        """Return the state recorded after the last call."""
        step = self._recorded()
        return step.after if self._updated else step.planned

    def _recorded(self) -> V0RecordedStep:
        if self._step is None:
            raise ImplementationFailed("the trace has no step here")
        return self._step


class V0TraceImplementation:
    """A recording as an implementation; its schedulers can only be driven as the recorded one was.

    Parameters
    ----------
    recording : V0Recording
    """

    def __init__(self, recording: V0Recording) -> None:
        self.name = recording.implementation
        self._recording = recording

    def make_v0_scheduler(
        self, scheduler: V0SchedulerConfig, cache: V0CacheConfig
    ) -> _V0TraceScheduler:
        """Return a scheduler that answers as recorded.

        Raises
        ------
        ImplementationFailed
            If the configurations are not the recorded ones.
        """
        case = self._recording.case
        if (scheduler, cache) != (case.scheduler, case.cache):
            raise ImplementationFailed("the trace was recorded with other configurations")
        return _V0TraceScheduler(self._recording)


def record_v0_case(real: V0SchedulerFactory, case: V0Case, name: str) -> V0Recording:
    """Run a case on an implementation and keep its answers.

    Parameters
    ----------
    real : V0SchedulerFactory
    case : V0Case
    name : str
        What to call it in the recording.
    """
    scheduler = real.make_v0_scheduler(case.scheduler, case.cache)
    steps = []
    for taken in drive_v0(scheduler, case.workload):
        plan = V0Plan(output=taken.output)
        if taken.error is not None:
            plan = V0Plan(rule=taken.error.rule)
        steps.append(
            V0RecordedStep(
                plan=plan, planned=taken.planned, after=taken.after, outputs=taken.outputs
            )
        )
    return V0Recording(implementation=name, case=case, steps=tuple(steps))


def record_v0_matrix(
    real: V0SchedulerFactory, path: Path, seeds: Iterable[int], name: str = "vllm 0.5.1"
) -> int:
    """Record every combination of switches into a trace file.

    Parameters
    ----------
    real : V0SchedulerFactory
    path : Path
    seeds : iterable of int
        A case of each combination for each.
    name : str
        What to call `real` in the recordings.

    Returns
    -------
    int
        Steps recorded.
    """
    recordings = [
        record_v0_case(real, make_v0_case(combination, seed), name)
        for seed in seeds
        for combination in v0_matrix()
    ]
    write_traces(path, recordings)
    return sum(len(recording.steps) for recording in recordings)


def read_v0_traces(path: Path) -> Iterator[V0Recording]:
    """Read a trace file of V0 schedulers, one recording at a time.

    Parameters
    ----------
    path : Path

    Yields
    ------
    V0Recording

    Raises
    ------
    TraceError
        If the file is missing, too long, cut or not a trace.
    """
    return read_recordings(path, V0Recording)
