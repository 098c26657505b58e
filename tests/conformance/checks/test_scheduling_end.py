"""A case ends where the release that is reproduced dies: then whoever lives on has diverged."""

from __future__ import annotations

from typing import Any

from servespec.conformance.adapters.reference import ReferenceImplementation, ReferenceScheduler
from servespec.conformance.checks.scheduling import compare
from servespec.conformance.verdicts import DivergedError, Tally
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.reference.contracts import SchedulerDiedError, SchedulerOutput

CASE = make_case(matrix()[0], 3)


def mortal(last_step: int) -> ReferenceImplementation:
    """The reference, which dies after a step."""

    class Scheduler(ReferenceScheduler):
        steps = 0

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            self.steps += 1
            if self.steps > last_step:
                raise SchedulerDiedError("an assertion fails")
            return super().schedule(throttle_prefills)

    class Implementation(ReferenceImplementation):
        def make_scheduler(self, *configs: Any) -> Scheduler:
            return Scheduler(*configs)

    return Implementation()


def test_a_case_ends_where_both_die() -> None:
    tally = Tally()
    compare(*CASE, mortal(5), mortal(5), tally)
    assert tally.steps == 5


def test_who_lives_on_has_diverged() -> None:
    try:
        compare(*CASE, mortal(5), ReferenceImplementation(), Tally())
    except DivergedError as error:
        divergence = error.divergence
    assert (divergence.step, divergence.field) == (5, "scheduler_output")
    assert divergence.expected == "an error: an assertion fails"
    assert divergence.got.startswith("SchedulerOutput(")
