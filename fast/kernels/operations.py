"""The operations that have Triton kernels, bound to a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from servespec.fast.backends.base import Backend

__all__ = ["operations"]


def operations(backend: Backend) -> Mapping[str, Callable[..., Any]]:
    """Return the launchers of `servespec.fast.kernels.triton` by name, without their backend.

    Parameters
    ----------
    backend : Backend
        Made before any kernel is imported: the interpreter must be asked for first.
    """
    from servespec.fast.kernels.triton import (
        attention,
        chunk_gated_delta_rule,
        convolution,
        gated_delta_rule,
        int8_kv,
        kv_cache,
        norms,
        rotary,
        sampling,
    )

    launchers: tuple[Callable[..., Any], ...] = (
        attention.packed_attention,
        attention.paged_attention_decode,
        attention.varlen_attention,
        chunk_gated_delta_rule.chunk_gated_delta_rule,
        convolution.convolution_decode,
        convolution.convolution_rows,
        gated_delta_rule.gated_delta_rule_decode,
        gated_delta_rule.gated_delta_rule_rows,
        gated_delta_rule.gating,
        int8_kv.int8_attention_decode,
        int8_kv.int8_varlen_attention,
        kv_cache.write_int8,
        kv_cache.write_kv,
        norms.gated_rms_norm,
        norms.l2_norm,
        norms.rms_norm,
        rotary.norm_rotary,
        sampling.greedy,
        sampling.sample,
    )
    return {launcher.__name__: partial(launcher, backend) for launcher in launchers}
