"""Suite ``batch``: rows, inputs and metadata made of the same plans.

The reference scheduler runs without a model; its plans go to the reference's persistent batch and
to the other, whose records must agree in every field. Rows come and go, are condensed, reordered
and added again, so that a stale value in a reused row shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from servespec.conformance.adapters.reference import ReferenceBatch, ReferenceScheduler
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_batch, count_outputs, count_schedule
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import expect_equal
from servespec.conformance.verdicts import ExpectedStep, Tally, attempt
from servespec.conformance.workloads.driver import drive
from servespec.conformance.workloads.scheduling import scheduling
from servespec.reference.contracts import Quirks

__all__ = ["SUITE", "batch_cases", "check"]


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
    config = case.config
    scheduler = ReferenceScheduler(config.scheduler, config.cache, config.speculative)
    reference = ReferenceBatch(config)
    candidate = attempt(implementation.make_batch, config)
    for driven in drive(scheduler, case.workload, config):
        output = driven.output
        if any(count < 1 for count in output.num_scheduled_tokens.values()):
            break  # no worker could run it
        expected = reference.prepare(output)
        tally.expected.append(
            ExpectedStep(scheduler_output=output, sampled_token_ids=driven.sampled, batch=expected)
        )
        count_schedule(tally, output)
        count_batch(tally, expected)
        count_outputs(tally, driven.outputs)
        got = attempt(candidate.prepare, output)
        expect_equal(expected, got, "batch", step=driven.step, batch=expected)
        kept = {name: tokens for name, tokens in driven.sampled.items() if tokens}
        reference.append_sampled(kept)
        attempt(candidate.append_sampled, kept)
        tally.steps += 1
        tally.tokens += 0 if expected is None else len(expected.token_ids)


@st.composite
def batch_cases(draw: st.DrawFn) -> Case:
    """Return scheduling cases in which every step's tokens are known before the next."""
    # No worker can run what these two oddities plan.
    runnable = replace(
        Quirks.vllm_0_27_1(), negative_schedule=False, padded_admission_cut_late=False
    )
    config, workload = draw(scheduling(draw(st.sampled_from((Quirks(), runnable)))))
    scheduler = replace(config.scheduler, async_scheduling=False)
    return Case(suite="batch", config=replace(config, scheduler=scheduler), workload=workload)


SUITE = Suite(
    name="batch",
    summary="rows, inputs, attention state and metadata of random plans",
    needs="make_batch",
    cases=batch_cases,
    check=check,
    sizes={"quick": 150, "standard": 2000, "full": 50000},
    must_reach=(
        "preemptions",
        "resumptions",
        "prefix_hits",
        "split_prompts",
        "mixed_batches",
        "swaps",
        "drafts",
        "PrefillNoCache",
        "DecodeOnly",
        "ChunkedPrefill",
        "SpecDecoding",
    ),
)
