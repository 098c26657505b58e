"""Suite ``invariance``: the tokens of a request do not depend on how it was scheduled.

The reference serves each request alone. Then the reference and the other engine serve them

- alone,
- together,
- with every token budget from 1 to one that holds all prompts at once,
- with long prompts held back by a threshold,
- from a pool so small that requests preempt each other,
- twice, with prefix caching, so that the second time hits what the first left behind,

and every time each request must get the tokens it got alone. Nothing else is compared, so any
scheduler can pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from servespec.conformance.adapters.base import EngineUnderTest
from servespec.conformance.adapters.reference import ReferenceImplementation, tiny_weights
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.counting import count_batch, count_outputs, count_schedule
from servespec.conformance.checks.engine import checked_record, model_of
from servespec.conformance.checks.foreign import made, require_known
from servespec.conformance.checks.model import alone_config, most_steps
from servespec.conformance.checks.numbers import compare_token
from servespec.conformance.checks.suite import Suite
from servespec.conformance.verdicts import DivergedError, Divergence, Tally
from servespec.conformance.workloads.configurations import blocks_needed
from servespec.conformance.workloads.engine import request_lists
from servespec.conformance.workloads.models import dense_models, embedded_models, hybrid_models
from servespec.conformance.workloads.workload import Workload, WorkloadStep
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    MambaCacheMode,
    Request,
    SchedulerConfig,
    gdn_groups_first,
)

__all__ = ["SUITE", "Variant", "check", "invariance_cases", "variants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to serve the requests of a case.

    Attributes
    ----------
    name : str
    config : EngineConfig
    waves : tuple of tuple of Request
        Each wave arrives once the one before has ended.
    """

    name: str
    config: EngineConfig
    waves: tuple[tuple[Request, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    """What the reference gives one request alone: tokens, and the logits of each."""

    tokens: tuple[int, ...]
    logits: tuple[npt.NDArray[np.floating], ...]


def variants(case: Case) -> Iterator[Variant]:
    """Yield the ways in which the requests of a case are served.

    Parameters
    ----------
    case : Case
    """
    requests = case.workload.requests
    base = case.config
    total = sum(r.num_prompt_tokens for r in requests)
    yield Variant(name="alone", config=base, waves=tuple((r,) for r in requests))
    for budget in range(1, total + 1):
        config = _with_scheduler(base, max_num_batched_tokens=budget)
        yield Variant(name=f"budget {budget}", config=config, waves=(requests,))
    yield Variant(name="together", config=base, waves=(requests,))
    for threshold in (1, 3):
        config = _with_scheduler(base, long_prefill_token_threshold=threshold)
        yield Variant(name=f"threshold {threshold}", config=config, waves=(requests,))
    longest = base.scheduler.max_model_len
    least = max(blocks_needed(r, base.cache, longest) for r in requests)
    for budget in (5, base.scheduler.max_num_batched_tokens):
        # Admitting by the first chunk alone lets in requests that later crowd each other out.
        config = _with_scheduler(
            base, max_num_batched_tokens=budget, scheduler_reserve_full_isl=False
        )
        config = replace(config, cache=replace(base.cache, num_gpu_blocks=1 + least))
        yield Variant(name=f"tiny pool, budget {budget}", config=config, waves=(requests,))
    mode: MambaCacheMode = "align" if base.cache.has_gdn else "none"
    cache = replace(base.cache, enable_prefix_caching=True, mamba_cache_mode=mode)
    again = tuple(replace(r, request_id=f"{r.request_id} again") for r in requests)
    for budget in (7, base.scheduler.max_num_batched_tokens):
        config = replace(_with_scheduler(base, max_num_batched_tokens=budget), cache=cache)
        yield Variant(name=f"prefix hits, budget {budget}", config=config, waves=(requests, again))


def _with_scheduler(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, **changes))


def check(case: Case, implementation: Any, tally: Tally) -> None:
    """Run one case.

    Parameters
    ----------
    case : Case
        All requests arrive at once, whatever its workload says.
    implementation : EngineFactory
    tally : Tally

    Raises
    ------
    DivergedError
        The field names variant and engine.
    ImplementationFailed
    """
    model = model_of(case)
    assert case.model is not None
    weights = tiny_weights(case.model)
    reference = ReferenceImplementation()
    baselines = {}
    for request in case.workload.requests:
        engine = reference.make_engine(model, weights, alone_config(case))
        baselines[request.request_id] = _alone(engine, request)
    for variant in variants(case):
        engine = reference.make_engine(model, weights, variant.config)
        tokens = _serve(engine, variant, tally)
        for request_id, got in tokens.items():
            _compare(case, baselines, request_id, got, f"reference, {variant.name}", tally)
        candidate = made(
            "engine", implementation.make_engine, model, weights, variant.config, case.dtype
        )
        tokens = _serve(candidate, variant)
        for request_id, got in tokens.items():
            _compare(case, baselines, request_id, got, variant.name, tally)


def _alone(engine: EngineUnderTest, request: Request) -> _Baseline:
    engine.add_request(request)
    tokens: list[int] = []
    logits: list[npt.NDArray[np.floating]] = []
    while engine.has_unfinished_requests():
        record = engine.step()
        for output in record.outputs:
            assert record.logits is not None
            tokens += output.new_token_ids
            logits += [record.logits[0]] * len(output.new_token_ids)
    return _Baseline(tokens=tuple(tokens), logits=tuple(logits))


def _serve(
    engine: EngineUnderTest, variant: Variant, tally: Tally | None = None
) -> dict[str, list[int]]:
    """Serve all waves and return the tokens of each request.

    With a tally the engine is the reference's: counts come from what it decides.
    """
    tokens: dict[str, list[int]] = {}
    limit = most_steps(request for wave in variant.waves for request in wave)
    steps = 0
    for wave in variant.waves:
        for request in wave:
            engine.add_request(request)
            tokens[request.request_id] = []
        while engine.has_unfinished_requests():
            if steps == limit:
                waiting = next(r.request_id for r in wave if r.request_id in tokens)
                raise DivergedError(
                    Divergence(
                        field=f"progress[{variant.name}]",
                        expected=f"all requests to end within {limit} steps",
                        got="requests that never end",
                        step=steps,
                        request=waiting,
                    )
                )
            record = checked_record(engine.step())
            steps += 1
            require_known((output.request_id for output in record.outputs), tokens, "outputs")
            for output in record.outputs:
                tokens[output.request_id] += output.new_token_ids
            if tally is not None:
                tally.steps += 1
                count_schedule(tally, record.scheduler_output)
                count_batch(tally, record.batch)
                count_outputs(tally, record.outputs)
    return tokens


def _compare(
    case: Case,
    baselines: dict[str, _Baseline],
    request_id: str,
    got: Sequence[object],
    name: str,
    tally: Tally,
) -> None:
    first_id = request_id.removesuffix(" again")
    baseline = baselines[first_id]
    num_prompt = next(
        r.num_prompt_tokens for r in case.workload.requests if r.request_id == first_id
    )
    field = f"sampled_token_ids[{name}]"
    for position, (token, other) in enumerate(zip(baseline.tokens, got, strict=False)):
        same = compare_token(
            token,
            other,
            baseline.logits[position],
            model_of(case),
            case.dtype,
            tally,
            num_keys=num_prompt + position,
            step=None,
            request=request_id,
            field=f"{field}[{position}]",
        )
        if not same:
            return  # after a tie the two are different sequences
    if len(baseline.tokens) != len(got):
        raise DivergedError(
            Divergence(
                field=f"num_tokens[{name}]",
                expected=str(len(baseline.tokens)),
                got=str(len(got)),
                request=request_id,
            )
        )


@st.composite
def invariance_cases(draw: st.DrawFn) -> Case:
    """Return a few short requests and an engine with room for all of them."""
    model = draw(st.one_of(hybrid_models(), dense_models(), embedded_models()))
    requests = draw(
        request_lists(
            model.config.vocab_size, max_requests=4, max_prompt=9, max_long_prompt=14, max_tokens=6
        )
    )
    longest = max(r.num_prompt_tokens + r.sampling_params.max_tokens for r in requests) + 1
    total = sum(r.num_prompt_tokens for r in requests)
    cache = CacheConfig(
        num_gpu_blocks=2,
        block_size=draw(st.sampled_from((1, 2, 4))),
        groups=gdn_groups_first(model.config.layer_types),
    )
    room = 2 * sum(blocks_needed(r, cache, longest) for r in requests)
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=len(requests),
            max_num_batched_tokens=total + 8,
            max_model_len=longest,
        ),
        cache=replace(cache, num_gpu_blocks=1 + room + 4 * len(cache.groups)),
    )
    workload = Workload(steps=(WorkloadStep(add=requests),))
    return Case(suite="invariance", config=config, workload=workload, model=model)


SUITE = Suite(
    name="invariance",
    summary="the same tokens alone, together, chunked, preempted and from a prefix",
    needs="make_engine",
    cases=invariance_cases,
    check=check,
    sizes={"quick": 10, "standard": 100, "full": 1000},
    must_reach=("preemptions", "resumptions", "prefix_hits", "split_prompts", "mixed_batches"),
)
