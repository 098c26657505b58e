"""Strategies for scheduler and cache configurations of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Quirks,
    Request,
    SchedulerConfig,
    gdn_groups_first,
)

__all__ = [
    "TRUTHFUL_QUIRKS",
    "blocks_needed",
    "cache_configs",
    "engine_configs",
    "scheduler_configs",
]

TRUTHFUL_QUIRKS = replace(
    Quirks.vllm_0_27_1(),
    gdn_fresh_decode=False,
    preempted_step_stays_cached=False,
    overwritten_tail_published=False,
    aligned_split_starves=False,
)
"""The oddities of vLLM 0.27.1 but for those that make a model read what nobody wrote, whose
numbers no two memories share, and the one that starves requests. Decisions under all oddities are
the business of suite ``scheduling``."""


def blocks_needed(request: Request, cache: CacheConfig, max_model_len: int) -> int:
    """Return the blocks that one request needs alone, at its longest.

    Parameters
    ----------
    request : Request
    cache : CacheConfig
    max_model_len : int

    Returns
    -------
    int
        Every token's share of each full-attention group; one state for each GDN group, two in mode
        ``align``, where a step moves the state from one block to the next.
    """
    tokens = min(request.num_prompt_tokens + request.sampling_params.max_tokens, max_model_len)
    full = sum(group.layer_type == "full_attention" for group in cache.groups)
    states = 2 if cache.mamba_cache_mode == "align" else 1
    return full * -(-tokens // cache.block_size) + states * (len(cache.groups) - full)


@st.composite
def scheduler_configs(draw: st.DrawFn, max_model_len: int) -> SchedulerConfig:
    """Return scheduler configurations, most of them tight.

    Small budgets split prompts, small `max_num_seqs` makes requests wait, and chunked prefill is
    off in some.

    Parameters
    ----------
    max_model_len : int
    """
    chunked = draw(st.integers(0, 5)) > 0
    # Few budgets are tiny: a budget of 1 makes a step of every token.
    budget = draw(st.one_of(st.integers(4, 24), *[st.integers(8, 64)] * 3, st.integers(1, 256)))
    if not chunked:
        budget = max(budget, max_model_len)
    batched = budget + draw(st.sampled_from((0, 0, 0, 5)))
    return SchedulerConfig(
        max_num_seqs=draw(st.one_of(st.integers(1, 16), st.integers(4, 16))),
        max_num_batched_tokens=batched,
        max_num_scheduled_tokens=draw(st.sampled_from((None, budget))),
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(
            st.one_of(*[st.just(0)] * 3, st.integers(1, min(16, max_model_len)))
        ),
        policy=draw(st.sampled_from(("fcfs", "priority"))),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.05, 0.2))),
        scheduler_reserve_full_isl=draw(st.booleans()),
        quirks=draw(st.sampled_from((Quirks(), TRUTHFUL_QUIRKS))),
    )


@st.composite
def cache_configs(
    draw: st.DrawFn, model: ModelConfig, requests: Sequence[Request], max_model_len: int
) -> CacheConfig:
    """Return block pools in which every request fits alone and seldom all together.

    Parameters
    ----------
    model : ModelConfig
    requests : sequence of Request
        Those that will run.
    max_model_len : int
    """
    hybrid = "linear_attention" in model.layer_types
    caching = draw(st.booleans())
    cache = CacheConfig(
        num_gpu_blocks=2,
        block_size=draw(st.sampled_from((1, 2, 4, 4, 8, 16))),
        enable_prefix_caching=caching,
        mamba_cache_mode="align" if hybrid and caching else "none",
        groups=gdn_groups_first(model.layer_types),
    )
    needed = [blocks_needed(r, cache, max_model_len) for r in requests] or [1]
    least, most = max(needed), sum(needed)
    wide = st.integers(least, max(least, most))
    free = draw(st.one_of(st.integers(least, least + 3), wide, st.just(max(least, most))))
    return replace(cache, num_gpu_blocks=1 + free)


@st.composite
def engine_configs(
    draw: st.DrawFn,
    model: ModelConfig,
    requests: Sequence[Request],
    max_model_len: int,
) -> EngineConfig:
    """Return engine configurations for a model and the requests that will run.

    Parameters
    ----------
    model : ModelConfig
    requests : sequence of Request
    max_model_len : int
    """
    scheduler = draw(scheduler_configs(max_model_len))
    cache = draw(cache_configs(model, requests, max_model_len))
    if cache.mamba_cache_mode == "align":
        # Prompts are cut at block boundaries, so they must be cut at all.
        scheduler = replace(scheduler, enable_chunked_prefill=True)
    return EngineConfig(scheduler=scheduler, cache=cache, keep_logits=True)
