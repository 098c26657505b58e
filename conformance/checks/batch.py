"""Suite ``batch``: rows, inputs and metadata made of the same plans.

Plans come from two sources. The reference scheduler makes plans as an engine sees them. A stream
of random plans skips, drops, resumes and resubmits requests all the time, with drafts, aligned
states, graphs and kernel blocks. Both go to the reference's persistent batch and to the other,
whose records must agree in every field. Rows come and go, are condensed, reordered, padded and
added again, so that a stale value in a reused row shows; the fast path overwrites whatever no live
request owns before each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from servespec.conformance.adapters.base import StateSaving
from servespec.conformance.adapters.reference import ReferenceBatch, ReferenceScheduler
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_batch, count_outputs, count_schedule
from servespec.conformance.checks.foreign import itself, made
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import expect_equal
from servespec.conformance.verdicts import ExpectedStep, Tally
from servespec.conformance.workloads.driver import drive
from servespec.conformance.workloads.plans import plans
from servespec.conformance.workloads.scheduling import scheduling
from servespec.conformance.workloads.workload_v0 import NO_WORKLOAD
from servespec.reference.contracts import BatchRecord, Quirks, SchedulerOutput

__all__ = ["SUITE", "batch_cases", "check", "planned_cases"]

Sampled = Mapping[str, tuple[int, ...]]


def check(case: Case, implementation: Any, tally: Tally) -> None:
    """Run one case.

    Parameters
    ----------
    case : Case
    implementation : BatchFactory
    tally : Tally

    Raises
    ------
    DivergedError, ImplementationFailed
    """
    reference = ReferenceBatch(case.config)
    candidate = made("batch", implementation.make_batch, case.config)
    saves_states = isinstance(itself(candidate), StateSaving)
    seen: set[str] = set()
    before: BatchRecord | None = None
    for output, sampled in _steps(case, tally):
        step = tally.steps
        expected = reference.prepare(output)
        tally.expected.append(
            ExpectedStep(scheduler_output=output, sampled_token_ids=sampled, batch=expected)
        )
        count_schedule(tally, output)
        count_batch(tally, expected, before)
        got = candidate.prepare(output)
        expect_equal(expected, got, "batch", step=step, batch=expected, optional=True)
        saves = reference.state_saves(sampled)
        tally.counts["state_saves"] += sum(map(len, saves))
        if saves_states:
            expect_equal(saves, candidate.state_saves(sampled), "state_saves", step=step)
        reference.append_sampled(sampled)
        candidate.append_sampled(sampled)
        if expected is not None:
            _count_rows(tally, output, expected, before, seen)
        before = expected
        tally.steps += 1
        tally.tokens += 0 if expected is None else len(expected.token_ids)


def _steps(case: Case, tally: Tally) -> Iterator[tuple[SchedulerOutput, Sampled]]:
    """Yield each plan with the tokens that its requests keep."""
    if case.plans is not None:
        kernel = case.config.cache.kernel_block_size
        tally.counts["kernel_blocks"] += kernel not in (None, case.config.cache.block_size)
        for planned in case.plans:
            yield planned.output, planned.sampled
        return
    config = case.config
    scheduler = ReferenceScheduler(config.scheduler, config.cache, config.speculative)
    for driven in drive(scheduler, case.workload, config):
        if any(count < 1 for count in driven.output.num_scheduled_tokens.values()):
            return  # no worker could run it
        count_outputs(tally, driven.outputs)
        yield driven.output, {name: tokens for name, tokens in driven.sampled.items() if tokens}


def _count_rows(
    tally: Tally,
    output: SchedulerOutput,
    batch: BatchRecord,
    before: BatchRecord | None,
    seen: set[str],
) -> None:
    """Count rows that came back after steps without them, and ids that came back anew."""
    resumed = output.scheduled_cached_reqs.resumed_req_ids
    new = {request.req_id for request in output.scheduled_new_reqs}
    kept = set() if before is None else set(before.req_ids)
    tally.counts["re_added"] += len(set(batch.req_ids) - kept - resumed - new)
    tally.counts["ids_used_again"] += len(new & seen)
    seen |= new


@st.composite
def planned_cases(draw: st.DrawFn) -> Case:
    """Return cases of random plans that no scheduler made."""
    config, steps = draw(plans())
    return Case(suite="batch", config=config, workload=NO_WORKLOAD, plans=steps)


@st.composite
def scheduled_cases(draw: st.DrawFn) -> Case:
    """Return scheduling cases in which every step's tokens are known before the next."""
    # No worker can run what these two oddities plan.
    runnable = replace(
        Quirks.vllm_0_27_1(), negative_schedule=False, padded_admission_cut_late=False
    )
    config, workload = draw(scheduling(draw(st.sampled_from((Quirks(), runnable)))))
    scheduler = replace(config.scheduler, async_scheduling=False)
    return Case(suite="batch", config=replace(config, scheduler=scheduler), workload=workload)


def batch_cases() -> st.SearchStrategy[Case]:
    """Return cases of both kinds."""
    return st.one_of(scheduled_cases(), planned_cases())


SUITE = Suite(
    name="batch",
    summary="rows, inputs, attention state and metadata of random plans",
    needs="make_batch",
    cases=batch_cases,
    check=check,
    sizes={"quick": 240, "standard": 3000, "full": 100_000},
    must_reach=(
        "preemptions",
        "resumptions",
        "prefix_hits",
        "split_prompts",
        "mixed_batches",
        "rows_removed",
        "re_added",
        "ids_used_again",
        "swaps",
        "drafts",
        "padded_rows",
        "kernel_blocks",
        "state_moves",
        "state_saves",
        "graph_FULL",
        "graph_PIECEWISE",
        "graph_NONE",
        "PrefillNoCache",
        "PrefillCacheHit",
        "DecodeOnly",
        "ChunkedPrefill",
        "SpecDecoding",
    ),
)
