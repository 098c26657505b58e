"""Suite ``model``: numbers whatever the schedule.

The reference computes each request alone, its prompt in one piece; the other engine computes all
of them together, in whatever chunks its own scheduler makes. Both go on from the same given
tokens, so that every row of logits has a twin, whichever step it fell into. Nothing of the plan is
compared: an engine with another scheduler can pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from servespec.conformance.adapters.base import EngineUnderTest
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.reference import ReferenceImplementation, tiny_weights
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_batch, count_schedule
from servespec.conformance.checks.engine import checked_record, model_of
from servespec.conformance.checks.foreign import made, require_known
from servespec.conformance.checks.numbers import (
    compare_logits,
    compare_token,
    float_array,
    single_token,
)
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import shown
from servespec.conformance.verdicts import DivergedError, Divergence, Tally
from servespec.conformance.workloads.driver import PretendWorker
from servespec.conformance.workloads.engine import engine_cases
from servespec.conformance.workloads.workload import WorkloadStep
from servespec.reference.contracts import (
    BatchRecord,
    CacheConfig,
    EngineConfig,
    Request,
    SchedulerConfig,
    StepRecord,
)

__all__ = ["SUITE", "alone_config", "check", "most_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an engine computed for one position of one request.

    Attributes
    ----------
    step : int
    request : str
    num_tokens : int
        Tokens of the request before the sampled one.
    logits : numpy.ndarray
        ``[vocab_size]``.
    token : int
        The engine's own choice.
    """

    step: int
    request: str
    num_tokens: int
    logits: npt.NDArray[np.float64]
    token: object


def most_steps(requests: Iterable[Request]) -> int:
    """Return more steps than any scheduler needs that computes a token a step.

    Ten times the tokens leave room for requests that preempt each other.

    Parameters
    ----------
    requests : iterable of Request
    """
    return 50 + 10 * sum(r.num_prompt_tokens + r.sampling_params.max_tokens for r in requests)


def alone_config(case: Case) -> EngineConfig:
    """Return a configuration in which one request runs by itself, its prompt in one piece.

    Parameters
    ----------
    case : Case
    """
    cache, longest = case.config.cache, case.config.scheduler.max_model_len
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=longest, max_model_len=longest
        ),
        cache=CacheConfig(
            num_gpu_blocks=1 + len(cache.groups) * -(-longest // cache.block_size),
            block_size=cache.block_size,
            groups=cache.groups,
        ),
        keep_logits=True,
    )


def check(case: Case, implementation: Any, tally: Tally) -> None:
    """Run one case.

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
    assert case.model is not None
    weights = tiny_weights(case.model)
    expected: dict[tuple[str, int], Row] = {}
    for request in case.workload.requests:
        engine = ReferenceImplementation().make_engine(model, weights, alone_config(case))
        for row in _rows(engine, case, (WorkloadStep(add=(request,)),)):
            expected[row.request, row.num_tokens] = row
    candidate = made("engine", implementation.make_engine, model, weights, case.config, case.dtype)
    for got in _rows(candidate, case, case.workload.steps, tally):
        wanted = expected.pop((got.request, got.num_tokens), None)
        if wanted is None:
            raise DivergedError(
                Divergence(
                    field="rows",
                    expected="each position once",
                    got=f"another row after {got.num_tokens} tokens",
                    step=got.step,
                    request=got.request,
                )
            )
        compare_logits(
            wanted.logits,
            got.logits,
            model,
            case.dtype,
            num_keys=got.num_tokens,
            step=got.step,
            request=got.request,
        )
        assert isinstance(wanted.token, int)
        compare_token(
            wanted.token,
            got.token,
            wanted.logits,
            model,
            case.dtype,
            tally,
            num_keys=got.num_tokens,
            step=got.step,
            request=got.request,
        )
    for request_id, num_tokens in expected:
        raise DivergedError(
            Divergence(
                field="rows",
                expected=f"a row after {num_tokens} tokens",
                got="none",
                step=tally.steps,
                request=request_id,
            )
        )


def _rows(
    engine: EngineUnderTest,
    case: Case,
    steps: Sequence[WorkloadStep],
    tally: Tally | None = None,
) -> Iterator[Row]:
    """Run an engine on given tokens and yield what it computes for each position it samples.

    Without a tally the engine is the reference's.
    """
    model = model_of(case)
    worker = PretendWorker(replace(case.workload, num_token_ids=model.vocab_size), None)
    num_tokens: dict[str, int] = {}
    for number in range(most_steps(case.workload.requests) + len(steps)):
        for request in steps[number].add if number < len(steps) else ():
            engine.add_request(request)
            num_tokens[request.request_id] = request.num_prompt_tokens
        if number >= len(steps) and not engine.has_unfinished_requests():
            break
        forced = {name: (worker.token(name, length),) for name, length in num_tokens.items()}
        record = checked_record(engine.step(forced))
        if tally is not None:
            tally.steps += 1
        if record.batch is None:
            continue
        require_known(record.batch.req_ids, num_tokens, "batch.req_ids")
        require_known(record.sampled_token_ids, num_tokens, "sampled_token_ids")
        yield from _sampled_rows(record, number, model.vocab_size, num_tokens)
        if tally is not None:
            try:
                count_schedule(tally, record.scheduler_output)
                count_batch(tally, record.batch)
            except (LookupError, ValueError) as error:
                raise ImplementationFailed(f"the record contradicts itself: {error}") from error
        for request_id in record.sampled_token_ids:
            num_tokens[request_id] += 1


def _sampled_rows(
    record: StepRecord, number: int, vocab_size: int, num_tokens: dict[str, int]
) -> Iterator[Row]:
    batch = record.batch
    if not isinstance(batch, BatchRecord) or len(batch.sampled) != len(batch.req_ids):
        raise ImplementationFailed(f"batch is {shown(batch)}: must be a BatchRecord")
    logits = float_array(record.logits, (len(batch.req_ids), vocab_size), "logits")
    for row, request_id in enumerate(batch.req_ids):
        if not batch.sampled[row]:
            continue
        yield Row(
            step=number,
            request=request_id,
            num_tokens=num_tokens[request_id],
            logits=logits[row],
            token=single_token(record.sampled_token_ids.get(request_id), request_id),
        )


def _without_refusals(case: Case) -> Case:
    """Leave out what ends a request early or never lets it start."""

    def kept(request: Request) -> bool:
        return request.num_prompt_tokens < case.config.scheduler.max_model_len

    steps = tuple(WorkloadStep(add=tuple(filter(kept, step.add))) for step in case.workload.steps)
    return replace(case, workload=replace(case.workload, steps=steps))


SUITE = Suite(
    name="model",
    summary="logits of whole prompts against those of random chunks",
    needs="make_engine",
    cases=lambda: engine_cases("model").map(_without_refusals),
    check=check,
    sizes={"quick": 40, "standard": 300, "full": 3000},
    must_reach=("split_prompts", "mixed_batches", "preemptions", "prefix_hits"),
)
