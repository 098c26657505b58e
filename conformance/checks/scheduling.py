"""Suite ``scheduling``: every decision and every block, call for call, beside the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import NoReturn

from servespec.conformance.adapters.base import SchedulerFactory, SchedulerUnderTest
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_outputs, count_schedule
from servespec.conformance.checks.foreign import made
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import expect_equal, plainly_equal, shown
from servespec.conformance.verdicts import (
    DivergedError,
    Divergence,
    ExpectedStep,
    Tally,
)
from servespec.conformance.workloads.driver import DrivenStep, drive
from servespec.conformance.workloads.scheduling import scheduler_cases
from servespec.conformance.workloads.workload import Workload
from servespec.reference.contracts import (
    EngineConfig,
    EngineCoreOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerDiedError,
    SchedulerOutput,
    SchedulerSnapshot,
)

__all__ = ["SUITE", "Lockstep", "check", "compare"]


class _EndOfCaseError(Exception):
    """Both sides died where the release that is reproduced does."""


class Lockstep:
    """Two schedulers that are told the same; every answer and every state is compared.

    Parameters
    ----------
    expected, got : SchedulerUnderTest
        The first decides what the caller sees; the second is one that `made` returned.

    Attributes
    ----------
    step : int
        Steps scheduled before the current one, for the divergence.
    before, after_schedule, after_update : SchedulerSnapshot
        The expected state after the previous step, after this step's plan and after its tokens.
    """

    def __init__(self, expected: SchedulerUnderTest, got: SchedulerUnderTest) -> None:
        self._expected = expected
        self._got = got
        self._in_flight: deque[tuple[SchedulerOutput, SchedulerOutput]] = deque()
        self.step = 0
        self.after_schedule = self.after_update = self.before = expected.snapshot()

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._expected.add_request(request)
        self._got.add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step and compare the plans."""
        try:
            expected = self._expected.schedule(throttle_prefills)
        except SchedulerDiedError as death:
            self._expect_death(throttle_prefills, death)
        got = self._got.schedule(throttle_prefills)
        self._compare(expected, got, "scheduler_output")
        self.before = self.after_update
        self.after_schedule = self.after_update = self._compare_snapshots("schedule")
        if expected.num_scheduled_tokens:
            self._in_flight.append((expected, got))
        self.step += 1
        return expected

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in sampled tokens and compare what they gave."""
        ours, theirs = self._in_flight.popleft()
        while ours is not output:
            ours, theirs = self._in_flight.popleft()
        expected = self._expected.update_from_output(ours, sampled)
        got = self._got.update_from_output(theirs, sampled)
        self._compare(expected, got, "outputs", self.step - 1)
        self.after_update = self._compare_snapshots("update_from_output", self.step - 1)
        return expected

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in drafts."""
        self._expected.update_draft_token_ids(drafts)
        self._got.update_draft_token_ids(drafts)

    def finish_requests(self, request_ids: tuple[str, ...], status: RequestStatus) -> None:
        """End requests from outside."""
        self._expected.finish_requests(request_ids, status)
        self._got.finish_requests(request_ids, status)
        self.after_update = self._compare_snapshots("finish_requests")

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume."""
        self._expected.set_pause_state(state)
        self._got.set_pause_state(state)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        expected = self._expected.reset_prefix_cache(reset_running_requests)
        got = self._got.reset_prefix_cache(reset_running_requests)
        self._compare(expected, got, "reset_prefix_cache")
        self.after_update = self._compare_snapshots("reset_prefix_cache")
        return expected

    def _expect_death(self, throttle_prefills: bool, death: SchedulerDiedError) -> NoReturn:
        """End the case where what is reproduced ends too; whoever lives on has diverged."""
        try:
            got = self._got.schedule(throttle_prefills)
        except ImplementationFailed:
            raise _EndOfCaseError from death
        raise DivergedError(
            Divergence(
                field="scheduler_output",
                expected=f"an error: {death}",
                got=shown(got),
                step=self.step,
            )
        )

    def _compare_snapshots(self, call: str, step: int | None = None) -> SchedulerSnapshot:
        expected = self._expected.snapshot()
        got = self._got.snapshot()
        self._compare(expected, got, f"snapshot after {call}", step)
        return expected

    def _compare(self, expected: object, got: object, field: str, step: int | None = None) -> None:
        # Equality is cheap and nearly always holds; only the order of a mapping escapes it.
        if plainly_equal(expected, got) and not (
            isinstance(expected, SchedulerOutput)
            and isinstance(got, SchedulerOutput)
            and list(expected.num_scheduled_tokens) != list(got.num_scheduled_tokens)
        ):
            return
        expect_equal(expected, got, field, step=self.step if step is None else step)


def count(driven: DrivenStep, lockstep: Lockstep, tally: Tally) -> None:
    """Count what a step did, beside what `count_schedule` and `count_outputs` count.

    Parameters
    ----------
    driven : DrivenStep
    lockstep : Lockstep
        For the states around the step.
    tally : Tally
        Gains ``split_prompts`` (rows that go on with a prompt), ``padded_admissions``,
        ``rejected_drafts``, ``zeroed_blocks``, ``null_blocks``, ``common_prefixes``, ``aborts``,
        ``pauses``, ``resets``, ``stale_outputs`` (tokens of a request preempted meanwhile),
        ``skipped_waiting``, ``negative_schedules`` and ``blocked_heads`` (steps in which nothing
        runs and the first in the queue does not fit).
    """
    output, events = driven.output, driven.events
    state, counts = lockstep.after_schedule, tally.counts
    count_schedule(tally, output, lockstep.before, state)
    count_outputs(tally, driven.outputs)
    cached = output.scheduled_cached_reqs
    admitted = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
    counts["padded_admissions"] += len(admitted & output.scheduled_spec_decode_tokens.keys())
    counts["split_prompts"] += sum(
        num_output == 0 and request_id not in admitted
        for request_id, num_output in zip(cached.req_ids, cached.num_output_tokens, strict=True)
    )
    counts["null_blocks"] += any(
        0 in blocks for new in output.scheduled_new_reqs for blocks in new.block_ids
    )
    counts["zeroed_blocks"] += len(output.new_block_ids_to_zero)
    counts["common_prefixes"] += any(output.num_common_prefix_blocks)
    counts["negative_schedules"] += any(n < 1 for n in output.num_scheduled_tokens.values())
    counts["aborts"] += len(events.abort)
    counts["pauses"] += bool(events.pause)
    counts["resets"] += events.reset_prefix_cache is not None
    counts["skipped_waiting"] += bool(state.skipped_waiting)
    if not output.num_scheduled_tokens and not state.running and state.waiting:
        counts["blocked_heads"] += state.pause_state is PauseState.UNPAUSED
    queued = {*state.waiting, *state.skipped_waiting}
    planned = {} if driven.updated is None else driven.updated.scheduled_spec_decode_tokens
    for request_id, tokens in driven.sampled.items():
        counts["stale_outputs"] += bool(tokens) and request_id in queued
        if tokens and request_id in planned:
            counts["rejected_drafts"] += len(planned[request_id]) + 1 - len(tokens)


def compare(
    config: EngineConfig,
    workload: Workload,
    expected: SchedulerFactory,
    got: SchedulerFactory,
    tally: Tally,
    keep: bool = True,
) -> None:
    """Run a workload on two implementations in lockstep.

    Parameters
    ----------
    config : EngineConfig
    workload : Workload
    expected, got : SchedulerFactory
        The first is held to be right.
    tally : Tally
        Counts what happened.
    keep : bool
        Whether the steps of `expected` are kept in the tally.

    Raises
    ------
    DivergedError
        At the first difference.
    ImplementationFailed
        If `got` fails.
    """
    configs = (config.scheduler, config.cache, config.speculative)
    lockstep = Lockstep(
        expected.make_scheduler(*configs), made("scheduler", got.make_scheduler, *configs)
    )
    with suppress(_EndOfCaseError):
        for driven in drive(lockstep, workload, config):
            count(driven, lockstep, tally)
            tally.steps += 1
            tally.tokens += sum(len(result.new_token_ids) for result in driven.outputs)
            if keep:
                tally.expected.append(
                    ExpectedStep(
                        scheduler_output=driven.output,
                        sampled_token_ids=driven.sampled,
                        outputs=driven.outputs,
                        snapshot=lockstep.after_update,
                    )
                )


def check(case: Case, implementation: SchedulerFactory, tally: Tally) -> None:
    """Compare one case with the reference.

    Parameters
    ----------
    case : Case
    implementation : SchedulerFactory
    tally : Tally
    """
    compare(case.config, case.workload, ReferenceImplementation(), implementation, tally)


SUITE = Suite(
    name="scheduling",
    summary="every decision and every block of the scheduler",
    needs="make_scheduler",
    cases=partial(scheduler_cases, "scheduling"),
    check=check,
    sizes={"quick": 300, "standard": 3_000, "full": 30_000},
    must_reach=(
        "preemptions",
        "resumptions",
        "prefix_hits",
        "evictions",
        "split_prompts",
        "padded_admissions",
        "rejected_drafts",
        "blocked_heads",
        "aborts",
        "pauses",
        "resets",
        "stale_outputs",
        "zeroed_blocks",
    ),
)
