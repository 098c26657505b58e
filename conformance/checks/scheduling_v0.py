"""Suite ``scheduling-v0``: the legacy scheduler's every decision beside the reference's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.v0_base import V0SchedulerFactory, V0SchedulerUnderTest
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.foreign import made
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import expect_equal, plainly_equal
from servespec.conformance.verdicts import Tally
from servespec.conformance.workloads.driver_v0 import V0StepTaken, drive_v0
from servespec.conformance.workloads.scheduling_v0 import v0_cases
from servespec.conformance.workloads.workload_v0 import NO_ENGINE, NO_WORKLOAD, V0Case
from servespec.reference.contracts import FinishReason
from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceSample,
    V0SchedulerOutput,
    V0SchedulingError,
    V0Snapshot,
)

__all__ = ["SUITE", "V0Lockstep", "check", "compare_v0", "count_v0", "of_v0"]


class V0Lockstep:
    """Two V0 schedulers that are told the same; every answer and every state is compared.

    Parameters
    ----------
    expected, got : V0SchedulerUnderTest
        The first decides what the caller sees; the second is one that `made` returned.

    Raises
    ------
    DivergedError, ImplementationFailed
        From any call.

    Attributes
    ----------
    step : int
        Steps planned so far.
    """

    def __init__(self, expected: V0SchedulerUnderTest, got: V0SchedulerUnderTest) -> None:
        self._expected = expected
        self._got = got
        self._planned: tuple[V0SchedulerOutput, V0SchedulerOutput] | None = None
        self._snapshot = expected.snapshot()
        self.step = 0

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request."""
        self._expected.add_seq_group(request)
        self._got.add_seq_group(request)

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""
        self._expected.abort_seq_group(request_ids)
        self._got.abort_seq_group(request_ids)

    def schedule(self, now: float) -> V0SchedulerOutput:
        """Plan one step and compare the plans, or why there is none."""
        expected = _plan(self._expected, now)
        got = _plan(self._got, now)
        self.step += 1
        if isinstance(expected, V0SchedulingError) or isinstance(got, V0SchedulingError):
            expect_equal(_rule(expected), _rule(got), "gives_up", step=self.step - 1, optional=True)
            assert isinstance(expected, V0SchedulingError)
            raise expected
        self._compare(expected, got, "output")
        self._compare_snapshots("schedule")
        self._planned = (expected, got)
        return expected

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Take in samples and compare what they gave."""
        assert self._planned is not None
        ours, theirs = self._planned
        expected = self._expected.update_from_output(ours, sampled)
        got = self._got.update_from_output(theirs, sampled)
        self._compare(expected, got, "outputs")
        self._compare_snapshots("update_from_output")
        return expected

    def snapshot(self) -> V0Snapshot:
        """Return the state after the last call that was compared."""
        return self._snapshot

    def _compare_snapshots(self, call: str) -> None:
        self._snapshot = self._expected.snapshot()
        self._compare(self._snapshot, self._got.snapshot(), f"snapshot after {call}")

    def _compare(self, expected: object, got: object, field: str) -> None:
        # Equality is cheap and nearly always holds; it ignores the order of mappings, which no
        # V0 record has a meaning for.
        if not plainly_equal(expected, got):
            expect_equal(expected, got, field, step=self.step - 1)


def _plan(scheduler: V0SchedulerUnderTest, now: float) -> V0SchedulerOutput | V0SchedulingError:
    try:
        return scheduler.schedule(now)
    except V0SchedulingError as error:
        return error
    except ImplementationFailed as error:
        if isinstance(error.__cause__, V0SchedulingError):
            return error.__cause__
        raise


def _rule(plan: V0SchedulerOutput | V0SchedulingError) -> str | None:
    return plan.rule if isinstance(plan, V0SchedulingError) else None


def count_v0(taken: V0StepTaken, case: V0Case, counts: Counter[str]) -> None:
    """Count what a step did.

    Parameters
    ----------
    taken : V0StepTaken
    case : V0Case
    counts : Counter
        Gains, by what is scheduled, ``prefills``, ``resumed_prefills`` (of recomputed groups),
        ``unfinished_chunks``, ``decodes``, ``forked_decodes``, ``mixed_batches``, ``sat_out``
        (running groups the budget did not reach), ``blocked_heads`` (steps with waiting groups
        and no prefill), ``held_back`` (those in which prompts waited for company),
        ``negative_chunks`` (after an overrun budget), ``idle_steps``; by what
        moves, ``recomputes``, ``swap_outs``, ``swap_ins``, ``moved_blocks``, ``copied_blocks``,
        ``lookahead_steps``, ``leaked_blocks`` (held by no sequence); by what ends, ``aborts``,
        ``ignored_prompts``, ``ignored_swapped``, ``ended_by_stop``, ``ended_by_length``; ``forks``
        and ``dropped_beams``; and ``gave up: RULE``.
    """
    counts["aborts"] += len(taken.events.abort)
    if taken.error is not None:
        counts[f"gave up: {taken.error.rule}"] += 1
    output = taken.output
    if output is None:
        return
    before, planned, groups = taken.before, taken.planned, output.scheduled_seq_groups
    for group in groups:
        seqs = planned.sequences[group.request_id]
        if group.is_prompt:
            counts["prefills"] += 1
            counts["resumed_prefills"] += bool(seqs[0].output_token_ids)
            counts["unfinished_chunks"] += not group.do_sample
        else:
            counts["decodes"] += 1
            counts["forked_decodes"] += len(group.block_tables) > 1
        counts["negative_chunks"] += group.token_chunk_size < 0
    counts["mixed_batches"] += 0 < output.num_prefill_groups < len(groups)
    counts["sat_out"] += len(planned.running) - len(groups)
    counts["blocked_heads"] += bool(before.waiting) and output.num_prefill_groups == 0
    counts["held_back"] += _held_back(taken, case)
    counts["idle_steps"] += not groups
    was_running, was_swapped = set(before.running), set(before.swapped)
    counts["recomputes"] += len(was_running.intersection(planned.waiting))
    counts["swap_outs"] += len(was_running.intersection(planned.swapped))
    counts["swap_ins"] += len(was_swapped.intersection(planned.running))
    counts["moved_blocks"] += len(output.blocks_to_swap_in) + len(output.blocks_to_swap_out)
    counts["copied_blocks"] += len(output.blocks_to_copy)
    counts["lookahead_steps"] += output.num_lookahead_slots > 0
    held = {block for table in planned.gpu_block_tables.values() for block in table}
    counts["leaked_blocks"] += len(planned.gpu_ref_counts) - len(planned.free_gpu_blocks) > len(
        held
    )
    ignored = was_swapped.intersection(output.ignored_request_ids)
    counts["ignored_swapped"] += len(ignored)
    counts["ignored_prompts"] += len(output.ignored_request_ids) - len(ignored)
    for result in taken.outputs:
        parents = {item.parent_seq_id for item in result.outputs}
        counts["forks"] += len(result.outputs) - len(parents)
        for item in result.outputs:
            counts["ended_by_length"] += item.finish_reason is FinishReason.LENGTH
            counts["ended_by_stop"] += item.finish_reason is FinishReason.STOP
    for group in groups:
        if group.do_sample:
            parents = {sample.parent_seq_id for sample in taken.sampled[group.request_id]}
            counts["dropped_beams"] += len(group.block_tables) - len(parents)


def _held_back(taken: V0StepTaken, case: V0Case) -> bool:
    config, before = case.scheduler, taken.before
    considered = config.enable_chunked_prefill or not before.swapped
    if not (config.delay_factor and considered and before.waiting and before.running):
        return False
    arrived = {request.request_id: request.arrival_time for request in case.workload.requests}
    waited = taken.now - min(arrived[name] for name in before.waiting)
    return waited <= config.delay_factor * taken.planned.last_prompt_latency


def compare_v0(
    case: V0Case, expected: V0SchedulerFactory, got: V0SchedulerFactory, tally: Tally
) -> None:
    """Run a case on two implementations in lockstep.

    Parameters
    ----------
    case : V0Case
    expected, got : V0SchedulerFactory
        The first is held to be right.
    tally : Tally
        Counts what happened.

    Raises
    ------
    DivergedError
        At the first difference.
    ImplementationFailed
        If `got` fails.
    """
    lockstep = V0Lockstep(
        expected.make_v0_scheduler(case.scheduler, case.cache),
        made("V0 scheduler", got.make_v0_scheduler, case.scheduler, case.cache),
    )
    for taken in drive_v0(lockstep, case.workload):
        count_v0(taken, case, tally.counts)
        tally.steps += 1
        tally.tokens += sum(len(result.outputs) for result in taken.outputs)


def of_v0(case: V0Case) -> Case:
    """Return a V0 case as a case of this suite."""
    return Case(suite="scheduling-v0", config=NO_ENGINE, workload=NO_WORKLOAD, v0=case)


def check(case: Case, implementation: V0SchedulerFactory, tally: Tally) -> None:
    """Compare one case with the reference.

    Parameters
    ----------
    case : Case
    implementation : V0SchedulerFactory
    tally : Tally

    Raises
    ------
    ValueError
        If the case has no V0 part.
    """
    if case.v0 is None:
        raise ValueError("case.v0 is null: suite scheduling-v0 needs it")
    compare_v0(case.v0, ReferenceImplementation(), implementation, tally)


def cases() -> st.SearchStrategy[Case]:
    """Return the strategy that makes cases of this suite."""
    return v0_cases().map(of_v0)


SUITE = Suite(
    name="scheduling-v0",
    summary="every decision and every block of the legacy V0 scheduler",
    needs="make_v0_scheduler",
    cases=cases,
    check=check,
    sizes={"quick": 150, "standard": 2_200, "full": 22_000},
    must_reach=(
        "resumed_prefills",
        "unfinished_chunks",
        "forked_decodes",
        "mixed_batches",
        "sat_out",
        "blocked_heads",
        "held_back",
        "recomputes",
        "swap_outs",
        "swap_ins",
        "copied_blocks",
        "lookahead_steps",
        "ignored_prompts",
        "ignored_swapped",
        "forks",
        "dropped_beams",
        "ended_by_stop",
        "ended_by_length",
        "aborts",
        "gave up: swap_space",
        "gave up: recompute_of_forks",
    ),
)
