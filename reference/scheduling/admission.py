"""Which requests an engine may accept at all.

A scheduler driven bare accepts any request, and one that never fits blocks all behind it for ever
(vLLM issue #35541); an engine asks here first, so that its user gets an error instead.

Source: the checks of ``vllm/v1/engine/input_processor.py``; the demand follows from the allocation
rules of `servespec.reference.cache`.
"""

from __future__ import annotations

from servespec.reference.cache.layout import GroupKind, GroupLayout, blocks_for, make_layout
from servespec.reference.contracts import (
    CacheConfig,
    CacheTooSmallError,
    Request,
    RequestError,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = ["blocks_alone", "check_request"]


def check_request(
    request: Request,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    speculative_config: SpeculativeConfig | None = None,
) -> None:
    """Refuse a request that could never finish.

    Parameters
    ----------
    request : Request
    scheduler_config : SchedulerConfig
    cache_config : CacheConfig
    speculative_config : SpeculativeConfig or None

    Raises
    ------
    RequestError
        If the prompt leaves no room for an output token within ``max_model_len``.
    CacheTooSmallError
        If the whole request needs more blocks than the pool has.
    """
    limit = scheduler_config.max_model_len
    if request.num_prompt_tokens >= limit:
        raise RequestError(
            f"Request({request.request_id!r}).prompt_token_ids has {request.num_prompt_tokens} "
            f"tokens: must be fewer than max_model_len = {limit}"
        )
    needed = blocks_alone(request, scheduler_config, cache_config, speculative_config)
    usable = cache_config.num_gpu_blocks - 1
    if needed > usable:
        raise CacheTooSmallError(
            f"Request({request.request_id!r}) needs up to {needed} blocks for its prompt of "
            f"{request.num_prompt_tokens} and {request.sampling_params.max_tokens} new tokens: "
            f"must be at most {usable}, the pool without its null block"
        )


def blocks_alone(
    request: Request,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    speculative_config: SpeculativeConfig | None = None,
) -> int:
    """Count the blocks a request may need at once when it runs alone.

    Its tokens are prompt and ``max_tokens``, at most ``max_model_len``, and so are their slots with
    the drafter's lookahead. Full attention needs a block for every `block_size` slots. GDN needs a
    state and one for each draft. In mode ``align``, as soon as there are two blocks of tokens, the
    state of every step that has not returned is kept besides; vLLM has two such steps under
    asynchronous scheduling. Where a prefix hit may end inside a block, every group holds that block
    together with its copy.

    With less, a request can be stuck alone in an empty cache; with this much and the oddities off
    the first in line always gets done.
    """
    layout = make_layout(scheduler_config, cache_config, speculative_config)
    limit = layout.max_model_len
    tokens = min(request.num_prompt_tokens + request.sampling_params.max_tokens, limit)
    slots = min(tokens + layout.num_lookahead_tokens, limit)

    copies = int(layout.is_fine)
    unreturned = 2 if scheduler_config.async_scheduling else 1

    def demand(group: GroupLayout) -> int:
        if group.kind is GroupKind.FULL_ATTENTION:
            return blocks_for(slots, group.block_size) + copies
        states = 1 + group.num_speculative_blocks
        if group.kind is GroupKind.GDN_NONE:
            return states
        return states + copies + (unreturned if tokens > group.block_size else 0)

    return sum(demand(group) for group in layout.groups)
