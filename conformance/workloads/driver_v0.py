"""Drive a legacy V0 scheduler through a workload without a model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from servespec.conformance.adapters.v0_base import V0SchedulerUnderTest
from servespec.conformance.workloads.workload_v0 import V0Step, V0Workload
from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceSample,
    V0SchedulerOutput,
    V0SchedulingError,
    V0Snapshot,
)

__all__ = ["PretendSampler", "V0StepTaken", "drive_v0"]

_PATIENCE = 6
_NO_EVENTS = V0Step()


class PretendSampler:
    """Samples for the groups of a plan, as a model and a sampler would return them.

    A group forks to its full width at its first token. Later every running sequence gets one
    token, except that a beam search, and more seldom any other group, may drop some and fork
    others.

    Parameters
    ----------
    workload : V0Workload
    """

    def __init__(self, workload: V0Workload) -> None:
        self._workload = workload
        self._requests = {request.request_id: request for request in workload.requests}
        self._times_sampled: dict[str, int] = {}

    def sample(self, output: V0SchedulerOutput) -> dict[str, tuple[SequenceSample, ...]]:
        """Return samples of every scheduled group that is to sample."""
        return {
            group.request_id: self._sample(group.request_id, tuple(group.block_tables))
            for group in output.scheduled_seq_groups
            if group.do_sample
        }

    def _sample(self, request_id: str, parents: tuple[int, ...]) -> tuple[SequenceSample, ...]:
        request = self._requests[request_id]
        times = self._times_sampled.get(request_id, 0)
        self._times_sampled[request_id] = times + 1
        chance = random.Random(f"{self._workload.token_seed} {request_id} {times}")
        if times == 0:
            chosen = parents * request.best_of
        elif chance.random() < self._workload.churn * (1.0 if request.use_beam_search else 0.2):
            chosen = tuple(sorted(chance.choices(parents, k=chance.randint(1, len(parents)))))
        else:
            chosen = parents
        return tuple(
            SequenceSample(
                parent_seq_id=parent, token_id=chance.randrange(self._workload.num_token_ids)
            )
            for parent in chosen
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class V0StepTaken:
    """One step of a driven scheduler.

    Attributes
    ----------
    events : V0Step
    now : float
        Seconds on the clock.
    before, planned, after : V0Snapshot
        The state before the plan, after it, and after its samples.
    output : V0SchedulerOutput or None
        None if the scheduler gave up.
    error : V0SchedulingError or None
        Why it gave up.
    sampled : mapping of str to tuple of SequenceSample
    outputs : tuple of SequenceGroupOutput
    """

    events: V0Step
    now: float
    before: V0Snapshot
    planned: V0Snapshot
    after: V0Snapshot
    output: V0SchedulerOutput | None = None
    error: V0SchedulingError | None = None
    sampled: Mapping[str, tuple[SequenceSample, ...]]
    outputs: tuple[SequenceGroupOutput, ...] = ()


def drive_v0(scheduler: V0SchedulerUnderTest, workload: V0Workload) -> Iterator[V0StepTaken]:
    """Run a workload on a scheduler, step by step.

    Parameters
    ----------
    scheduler : V0SchedulerUnderTest
        Fresh; what it returns decides what is sampled.
    workload : V0Workload

    Yields
    ------
    V0StepTaken
        After each step. The run ends when all requests have, after `V0Workload.max_steps` steps,
        when V0 gives up, or when nothing has happened for a while (a head that never fits).
    """
    sampler = PretendSampler(workload)
    clock = workload.start
    idle = 0
    for step in range(workload.max_steps):
        events = workload.steps[step] if step < len(workload.steps) else _NO_EVENTS
        clock += events.elapsed
        for request in events.add:
            scheduler.add_seq_group(request)
        if events.abort:
            scheduler.abort_seq_group(events.abort)
        before = scheduler.snapshot()
        try:
            output = scheduler.schedule(clock)
        except V0SchedulingError as error:
            yield V0StepTaken(
                events=events,
                now=clock,
                before=before,
                planned=before,
                after=before,
                error=error,
                sampled={},
            )
            return
        planned = scheduler.snapshot()
        sampled = sampler.sample(output)
        outputs = scheduler.update_from_output(output, sampled)
        after = scheduler.snapshot()
        yield V0StepTaken(
            events=events,
            now=clock,
            before=before,
            planned=planned,
            after=after,
            output=output,
            sampled=sampled,
            outputs=outputs,
        )
        happened = output.scheduled_seq_groups or output.ignored_request_ids or output.preempted
        idle = 0 if happened else idle + 1
        left = after.waiting or after.running or after.swapped
        if step + 1 >= len(workload.steps) and (not left or idle >= _PATIENCE):
            return
