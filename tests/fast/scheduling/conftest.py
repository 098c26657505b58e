"""A scheduler of few blocks, requests for it, and steps that sample at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    CacheConfig,
    KVCacheGroup,
    Quirks,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
)

ATTENTION = KVCacheGroup(layer_type="full_attention", layer_indices=(3,))
HYBRID = (
    KVCacheGroup(layer_type="linear_attention", layer_indices=(0, 1)),
    KVCacheGroup(layer_type="linear_attention", layer_indices=(2,)),
    ATTENTION,
)


def make_scheduler(
    *,
    blocks: int = 40,
    block_size: int = 4,
    hybrid: bool = False,
    caching: bool = False,
    unit: int | None = None,
    drafts: int = 0,
    method: Any = "ngram",
    quirks: Quirks | None = None,
    budget: int = 16,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    **scheduler: Any,
) -> Scheduler:
    aligned = caching and hybrid
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            quirks=quirks or Quirks(),
            **scheduler,
        ),
        CacheConfig(
            num_gpu_blocks=blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            mamba_cache_mode="align" if aligned else "none",
            prefix_match_unit=unit,
            groups=HYBRID if hybrid else (ATTENTION,),
        ),
        SpeculativeConfig(method=method, num_speculative_tokens=drafts) if drafts else None,
    )


def new_request(
    name: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 8,
    priority: int = 0,
    arrival: float = 0.0,
    **params: Any,
) -> Request:
    """Return a request; a number stands for a prompt of that many tokens of its own."""
    if isinstance(prompt, int):
        prompt = tuple(1000 * ord(name[-1]) + i for i in range(prompt))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        priority=priority,
        arrival_time=arrival,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
    )


def sampled(
    scheduler: Scheduler, plan: SchedulerOutput, tokens: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """One token, 7 unless told otherwise, for every row that has caught up."""
    requests = scheduler._state.requests
    found = {}
    for name, count in plan.num_scheduled_tokens.items():
        slot = requests.slot_of.get(name)
        caught_up = slot is not None and not requests.is_chunk[slot]
        found[name] = tokens.get(name, (7,)) if caught_up and count > 0 else ()
    return found


@pytest.fixture
def make() -> Callable[..., Scheduler]:
    return make_scheduler


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return new_request


@pytest.fixture
def answers() -> Callable[..., dict[str, tuple[int, ...]]]:
    return sampled


@pytest.fixture
def step() -> Callable[..., SchedulerOutput]:
    """Schedule and answer at once."""

    def take(
        scheduler: Scheduler, tokens: dict[str, tuple[int, ...]] | None = None
    ) -> SchedulerOutput:
        plan = scheduler.schedule().to_contract()
        scheduler.update_from_output(plan, sampled(scheduler, plan, tokens or {}))
        return plan

    return take
