"""Suite ``engine``: the reference engine and another in lockstep, layer by layer.

Both are given the same requests. After each step the layers are compared in the order in which
they follow from each other, so that the first difference is the cause: plan, batch (rows, inputs,
attention state, both kinds of metadata), logits, tokens, what the requests were given, and the
scheduler's state (blocks, reference counts, queues).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servespec.conformance.adapters.base import EngineUnderTest
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.reference import ReferenceImplementation, tiny_weights
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_batch, count_outputs, count_schedule
from servespec.conformance.checks.foreign import made, require_answer
from servespec.conformance.checks.numbers import (
    compare_logits,
    compare_token,
    float_array,
    single_token,
)
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import expect_equal, shown
from servespec.conformance.verdicts import (
    DivergedError,
    Divergence,
    ExpectedStep,
    Tally,
)
from servespec.conformance.workloads.engine import engine_cases
from servespec.conformance.workloads.workload import WorkloadStep
from servespec.reference.contracts import (
    BatchRecord,
    EngineCoreOutput,
    ModelConfig,
    SchedulerOutput,
    StepRecord,
)

__all__ = ["BFLOAT16_SUITE", "SUITE", "apply_events", "check", "checked_record", "engine_pair"]

_NO_EVENTS = WorkloadStep()
_PATIENCE = 4
"""Steps without a token after which nothing can change any more."""

_RECORD_FIELDS: Mapping[str, Any] = {
    "scheduler_output": SchedulerOutput,
    "batch": BatchRecord,
    "sampled_token_ids": Mapping[str, tuple[Any, ...]],  # `compare_token` names the request
    "outputs": tuple[EngineCoreOutput, ...],
}


def engine_pair(case: Case, implementation: Any) -> tuple[EngineUnderTest, EngineUnderTest]:
    """Return the reference's engine and an implementation's, on the same weights.

    Parameters
    ----------
    case : Case
        With a model.
    implementation : EngineFactory
    """
    model = model_of(case)
    assert case.model is not None
    weights = tiny_weights(case.model)
    reference = ReferenceImplementation().make_engine(model, weights, case.config)
    candidate = made("engine", implementation.make_engine, model, weights, case.config, case.dtype)
    return reference, candidate


def model_of(case: Case) -> ModelConfig:
    """Return the sizes of a case's model.

    Raises
    ------
    ValueError
        If it has none.
    """
    if case.model is None:
        raise ValueError(f"a case of suite {case.suite!r} needs a model")
    return case.model.config


def check(case: Case, implementation: Any, tally: Tally) -> None:
    """Run one case in lockstep.

    Parameters
    ----------
    case : Case
    implementation : EngineFactory
    tally : Tally

    Raises
    ------
    DivergedError, ImplementationFailed
    """
    model = model_of(case)
    reference, candidate = engine_pair(case, implementation)
    steps = case.workload.steps
    idle = 0
    for number in range(case.workload.max_steps):
        events = steps[number] if number < len(steps) else _NO_EVENTS
        apply_events(events, reference, candidate, tally, number)
        if number >= len(steps) and (idle == _PATIENCE or not reference.has_unfinished_requests()):
            break
        before = reference.snapshot()
        expected = reference.step()
        after = reference.snapshot()
        tally.expected.append(
            ExpectedStep(
                scheduler_output=expected.scheduler_output,
                sampled_token_ids=expected.sampled_token_ids,
                outputs=expected.outputs,
                batch=expected.batch,
                snapshot=after,
            )
        )
        count_schedule(tally, expected.scheduler_output, before, after)
        count_batch(tally, expected.batch)
        count_outputs(tally, expected.outputs)
        got = checked_record(candidate.step(expected.sampled_token_ids))
        _compare_step(expected, got, case, model, tally, number)
        expect_equal(after, candidate.snapshot(), "snapshot", step=number)
        tally.steps += 1
        idle = idle + 1 if expected.batch is None else 0
    expect_equal(
        reference.has_unfinished_requests(),
        bool(candidate.has_unfinished_requests()),
        "has_unfinished_requests",
        step=tally.steps,
    )


def apply_events(
    events: WorkloadStep,
    reference: EngineUnderTest,
    candidate: EngineUnderTest,
    tally: Tally,
    step: int,
) -> None:
    """Let requests arrive at both engines and abort others; both must refuse the same.

    Parameters
    ----------
    events : WorkloadStep
    reference, candidate : EngineUnderTest
    tally : Tally
    step : int

    Raises
    ------
    DivergedError
        If one engine accepts what the other refuses.
    ImplementationFailed
    """
    for request in events.add:
        refusal: ValueError | None = None
        try:
            reference.add_request(request)
        except ValueError as error:
            refusal = error
            tally.counts["refused"] += 1
        got = "accepted"
        try:
            candidate.add_request(request)
        except ImplementationFailed as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            got = f"refused: {error.__cause__}"
        if (refusal is None) != (got == "accepted"):
            raise DivergedError(
                Divergence(
                    field="add_request",
                    expected="accepted" if refusal is None else f"refused: {refusal}",
                    got=got,
                    step=step,
                    request=request.request_id,
                )
            )
    for request_id in events.abort:
        tally.counts["aborts"] += 1
        reference.abort_requests((request_id,))
        candidate.abort_requests((request_id,))


def checked_record(record: object) -> StepRecord:
    """Return what an implementation's step gave, if it is a record at all.

    Raises
    ------
    ImplementationFailed
    """
    if not isinstance(record, StepRecord):
        raise ImplementationFailed(f"step returned {shown(record)}: must be a StepRecord")
    for field, kind in _RECORD_FIELDS.items():
        value = getattr(record, field)
        if value is not None or field != "batch":
            require_answer(value, kind, field)
    return record


def _compare_step(
    expected: StepRecord, got: StepRecord, case: Case, model: ModelConfig, tally: Tally, step: int
) -> None:
    expect_equal(expected.scheduler_output, got.scheduler_output, "scheduler_output", step=step)
    batch = expected.batch
    expect_equal(batch, got.batch, "batch", step=step, batch=batch, optional=True)
    if batch is not None and expected.logits is not None:
        logits = float_array(got.logits, expected.logits.shape, "logits")
        for row, request in enumerate(batch.req_ids):
            if batch.sampled[row]:
                compare_logits(
                    expected.logits[row],
                    logits[row],
                    model,
                    case.dtype,
                    num_keys=batch.seq_lens[row],
                    step=step,
                    request=request,
                )
    expect_equal(
        frozenset(expected.sampled_token_ids),
        frozenset(got.sampled_token_ids),
        "sampled_req_ids",
        step=step,
    )
    for request, tokens in expected.sampled_token_ids.items():
        assert batch is not None
        row = batch.req_ids.index(request)
        compare_token(
            tokens[0],
            single_token(got.sampled_token_ids[request], request),
            None if expected.logits is None else expected.logits[row],
            model,
            case.dtype,
            tally,
            num_keys=batch.seq_lens[row],
            step=step,
            request=request,
        )
    expect_equal(expected.outputs, got.outputs, "outputs", step=step)


SUITE = Suite(
    name="engine",
    summary="plan, batch, metadata, logits, tokens and blocks of every step",
    needs="make_engine",
    cases=lambda: engine_cases("engine"),
    check=check,
    sizes={"quick": 300, "standard": 2000, "full": 20000},
    must_reach=(
        "preemptions",
        "resumptions",
        "evictions",
        "prefix_hits",
        "split_prompts",
        "mixed_batches",
        "swaps",
        "refused",
        "aborts",
        "ended_by_length",
        "ended_by_stop",
        "PrefillNoCache",
        "DecodeOnly",
        "ChunkedPrefill",
        "PrefillCacheHit",
    ),
)

BFLOAT16_SUITE = Suite(
    name="engine-bfloat16",
    summary="the same with an implementation that computes in bfloat16",
    needs="make_engine",
    cases=lambda: engine_cases("engine-bfloat16", dtype="bfloat16"),
    check=check,
    sizes={"quick": 25, "standard": 300, "full": 3000},
    must_reach=("preemptions", "split_prompts", "mixed_batches"),
    dtype="bfloat16",
)
