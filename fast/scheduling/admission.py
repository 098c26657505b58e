"""What an engine refuses before a scheduler sees it.

vLLM's scheduler itself checks neither: its front end refuses prompts that are too long, and a
request that fits no empty cache blocks everything behind it for ever (vllm-project/vllm#39734).
"""

from __future__ import annotations

from servespec.reference.contracts import (
    CacheConfig,
    CacheTooSmallError,
    Request,
    RequestError,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = ["check_request"]


def check_request(
    request: Request,
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    speculative_config: SpeculativeConfig | None = None,
) -> None:
    """Refuse a request that could never be served.

    Raises
    ------
    RequestError
        If the prompt leaves no room for an output token.
    CacheTooSmallError
        If prompt and output, at most ``max_model_len`` tokens, need more blocks than the cache
        has.
    """
    limit = scheduler_config.max_model_len
    name = f"request {request.request_id!r}"
    num_prompt = request.num_prompt_tokens
    if num_prompt >= limit:
        raise RequestError(
            f"{name}: prompt_token_ids has {num_prompt} tokens:"
            f" must be fewer than max_model_len = {limit}"
        )
    drafts = speculative_config.num_speculative_tokens if speculative_config else 0
    lookahead = speculative_config.num_lookahead_tokens if speculative_config else 0
    length = min(num_prompt + request.sampling_params.max_tokens, limit)
    size = cache_config.block_size
    aligned = cache_config.mamba_cache_mode == "align"
    unit = cache_config.prefix_match_unit
    copies = (
        cache_config.enable_prefix_caching
        and cache_config.has_gdn
        and len(cache_config.groups) > 1
        and unit is not None
        and unit < size
    )
    needed = 0
    for group in cache_config.groups:
        if group.layer_type == "full_attention":
            needed += -(-min(length + lookahead, limit) // size) + copies
        else:
            needed += 1 + drafts
            if aligned and length > size:
                # A step that crosses a boundary reads one state and writes another, and the state
                # before is kept for the step that is still in flight.
                needed += 2 if scheduler_config.async_scheduling else 1
            needed += copies
    available = cache_config.num_gpu_blocks - 1
    if needed > available:
        raise CacheTooSmallError(
            f"{name}: {length} tokens need {needed} blocks:"
            f" num_gpu_blocks = {cache_config.num_gpu_blocks} leaves {available}"
        )
