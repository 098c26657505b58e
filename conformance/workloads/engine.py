"""Strategies for requests, their arrival, and whole cases for engines.

Sizes are drawn from Hypothesis; token ids are filled in from one drawn seed, since a thousand
draws for a thousand tokens would spend a case's whole budget of choices on what matters least.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from servespec.conformance.cases.case import Case, Dtype, TinyModel
from servespec.conformance.workloads.configurations import engine_configs
from servespec.conformance.workloads.models import dense_models, embedded_models, hybrid_models
from servespec.conformance.workloads.workload import Workload, WorkloadStep
from servespec.reference.contracts import Request, SamplingParams

__all__ = ["arrivals", "engine_cases", "request_lists", "sampling_params"]


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int, max_tokens: int = 16) -> SamplingParams:
    """Return greedy sampling with random limits and stop tokens.

    Parameters
    ----------
    vocab_size : int
    max_tokens : int
        Most output tokens.
    """
    most = draw(st.integers(1, max_tokens))
    stop = draw(st.integers(0, 3)) == 0
    return SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)) if stop else 0,
        eos_token_id=draw(st.integers(0, vocab_size - 1)) if stop else None,
        stop_token_ids=tuple(range(0, vocab_size, draw(st.integers(8, 40)))) if stop else (),
    )


@st.composite
def request_lists(
    draw: st.DrawFn,
    vocab_size: int,
    *,
    max_requests: int = 12,
    max_prompt: int = 40,
    max_long_prompt: int = 160,
    max_tokens: int = 20,
) -> tuple[Request, ...]:
    """Return requests; some prompts start with the same tokens, most are short, a few long.

    Parameters
    ----------
    vocab_size : int
    max_requests : int
    max_prompt : int
        Most tokens of an ordinary prompt.
    max_long_prompt : int
        Most tokens of one prompt in eight.
    max_tokens : int
        Most output tokens of one request.
    """
    fill = random.Random(draw(st.integers(0, 2**32 - 1)))
    prefix = [fill.randrange(vocab_size) for _ in range(max_long_prompt)]
    requests = []
    for index in range(draw(st.integers(1, max_requests))):
        length = draw(st.integers(1, max_prompt))
        if draw(st.integers(0, 7)) == 7:
            length = draw(st.integers(max_prompt, max_long_prompt))
        shared = draw(st.integers(0, length))
        prompt = prefix[:shared] + [fill.randrange(vocab_size) for _ in range(length - shared)]
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=tuple(prompt),
                sampling_params=draw(sampling_params(vocab_size, max_tokens)),
                priority=draw(st.integers(0, 2)),
                arrival_time=float(index),
                cache_salt=draw(st.sampled_from((None, None, None, "tenant"))),
            )
        )
    return tuple(requests)


@st.composite
def arrivals(
    draw: st.DrawFn, requests: Sequence[Request], refused: Sequence[Request] = ()
) -> tuple[WorkloadStep, ...]:
    """Return steps in which requests arrive, and some of them are aborted.

    Parameters
    ----------
    requests : sequence of Request
        Each arrives once, in order.
    refused : sequence of Request
        Requests no engine accepts; they arrive at any time.
    """
    gaps = [draw(st.sampled_from((0, 0, 0, 1, 2))) if i else 0 for i in range(len(requests))]
    when = [sum(gaps[: index + 1]) for index in range(len(requests))]
    add: dict[int, list[Request]] = {}
    for request, step in zip(requests, when, strict=True):
        add.setdefault(step, []).append(request)
    for request in refused:
        add.setdefault(draw(st.integers(0, when[-1])), []).append(request)
    abort: dict[int, list[str]] = {}
    for request, step in zip(requests, when, strict=True):
        if draw(st.integers(0, 9)) == 9:
            at = step + draw(st.integers(1, 12))
            abort.setdefault(at, []).append(request.request_id)
    last = max([*add, *abort])
    return tuple(
        WorkloadStep(add=tuple(add.get(step, ())), abort=tuple(abort.get(step, ())))
        for step in range(last + 1)
    )


def _reachable(request: Request, max_model_len: int) -> Request:
    """Lower `min_tokens` to what the length allows; beyond it vLLM runs a request for ever."""
    params = request.sampling_params
    least = min(params.min_tokens, max_model_len - request.num_prompt_tokens)
    return replace(request, sampling_params=replace(params, min_tokens=least))


@st.composite
def engine_cases(
    draw: st.DrawFn,
    suite: str,
    models: st.SearchStrategy[TinyModel] | None = None,
    dtype: Dtype = "float32",
) -> Case:
    """Return whole cases for a suite that runs engines.

    Parameters
    ----------
    suite : str
    models : SearchStrategy, optional
        The embedded model, random hybrid and random dense models if left out.
    dtype : {"float32", "bfloat16"}
    """
    if models is None:
        models = st.one_of(embedded_models(), hybrid_models(), dense_models())
    model = draw(models)
    requests = draw(request_lists(model.config.vocab_size))
    longest = max(r.num_prompt_tokens for r in requests)
    max_model_len = longest + draw(st.integers(1, 32))
    requests = tuple(_reachable(request, max_model_len) for request in requests)
    refused = []
    if draw(st.integers(0, 5)) == 5:
        too_long = (1,) * (max_model_len + draw(st.integers(0, 3)))
        refused.append(Request(request_id="too-long", prompt_token_ids=too_long))
    return Case(
        suite=suite,
        config=draw(engine_configs(model.config, requests, max_model_len)),
        workload=Workload(steps=draw(arrivals(requests, refused)), max_steps=1000),
        model=model,
        dtype=dtype,
    )
