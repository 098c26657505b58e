"""Engines that plan their steps by the legacy V0 scheduler."""

from __future__ import annotations

from servespec.reference.contracts.config import (
    CacheConfig,
    EngineConfig,
    LayerType,
    SchedulerConfig,
    gdn_groups_first,
)
from servespec.reference.contracts.v0 import V0CacheConfig, V0EngineConfig, V0SchedulerConfig

__all__ = ["v0_engine_config"]


def v0_engine_config(
    layer_types: tuple[LayerType, ...],
    scheduler: V0SchedulerConfig,
    cache: V0CacheConfig,
    keep_logits: bool = False,
) -> EngineConfig:
    """Return the configuration of an engine under V0, its batch and pool as large as V0 needs.

    Parameters
    ----------
    layer_types : tuple of {"linear_attention", "full_attention"}
        Of the model.
    scheduler : V0SchedulerConfig
    cache : V0CacheConfig
    keep_logits : bool

    Raises
    ------
    ConfigError
        If the scheduler has a delay or lookahead slots.
    """
    v0 = V0EngineConfig(scheduler=scheduler, cache=cache)
    groups = gdn_groups_first(layer_types)
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=max(
                scheduler.max_num_batched_tokens, scheduler.max_model_len + 1
            ),
            max_model_len=scheduler.max_model_len + 1,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
        ),
        cache=CacheConfig(
            num_gpu_blocks=v0.num_blocks(len(groups)), block_size=cache.block_size, groups=groups
        ),
        keep_logits=keep_logits,
        v0=v0,
    )
