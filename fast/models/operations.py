"""How a model computes each operation on a device: a kernel where it wins, torch elsewhere.

On a CPU the choice goes by the table in ``fast/backends/measurements.md``. Elsewhere every kernel
is used: on an accelerator a launch costs little beside what it saves in traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from servespec.fast.backends.base import Backend
from servespec.fast.backends.registry import choose
from servespec.fast.cache.memory import GdnStates, PagedKV
from servespec.fast.kernels import (
    attention,
    chunk_gated_delta_rule,
    convolution,
    gated_delta_rule,
    kv_cache,
    norms,
    rotary,
)
from servespec.fast.kernels.operations import operations
from servespec.fast.models.plan import AttentionRows, AttentionStep, GdnPrefill, GdnStep
from servespec.reference.contracts import ModelConfig

__all__ = ["RECURRENT_TOKENS", "DeltaRuleTokens", "Operations", "winning_kernels"]

RECURRENT_TOKENS = 64
"""Tokens up to which a row goes through the recurrence on a CPU: beyond, chunks are as fast."""

_CPU = frozenset(
    {
        "convolution_decode",
        "gated_delta_rule_decode",
        "gated_delta_rule_rows",
        "norm_rotary",
        "paged_attention_decode",
    }
)
# In bfloat16 torch makes float32 copies on the way.
_CPU_BFLOAT16 = _CPU | {"convolution_rows", "rms_norm"}

# The recurrence over whole rows is for a CPU, where chunks are no faster on short ones.
_DEVICE = frozenset(
    {
        "chunk_gated_delta_rule",
        "convolution_decode",
        "convolution_rows",
        "gated_delta_rule_decode",
        "gated_rms_norm",
        "gating",
        "l2_norm",
        "norm_rotary",
        "paged_attention_decode",
        "rms_norm",
        "varlen_attention",
        "write_kv",
    }
)

_PAGED = ("paged_attention_decode", "varlen_attention")
_DELTA_RULE = ("chunk_gated_delta_rule", "gated_delta_rule_decode", "gated_delta_rule_rows")

# Sizes that a kernel's tiles take as they are: powers of two that a matrix product can have.
_TILED = {
    "head_dim": _PAGED,
    "linear_key_head_dim": _DELTA_RULE,
    "linear_value_head_dim": _DELTA_RULE,
}


def winning_kernels(backend: Backend, dtype: torch.dtype) -> frozenset[str]:
    """Return the operations whose kernels are used on a backend's device.

    Parameters
    ----------
    backend : Backend
    dtype : torch.dtype
        Of the model.
    """
    if backend.name != "cpu":
        return _DEVICE
    return _CPU_BFLOAT16 if dtype == torch.bfloat16 else _CPU


class DeltaRuleTokens(NamedTuple):
    """What the gated delta rule takes in: T tokens, float32.

    `q` and `k` ``[T, Hk, dk]`` are l2-normed, `q` is scaled by ``dk ** -0.5``; `v`
    ``[T, Hv, dv]``; `g` and `beta` ``[T, Hv]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, tokens: slice) -> DeltaRuleTokens:
        """Return some of the tokens."""
        return DeltaRuleTokens(*(x[tokens] for x in self))


class Operations:
    """The operations of a model's layers.

    Parameters
    ----------
    config : ModelConfig
        Kernels that want head sizes to be powers of two, of 16 at least on an accelerator, are not
        used for others.
    dtype : torch.dtype
        Of activations.
    backend : Backend or None
        None means torch alone.
    kernels : iterable of str or None
        Operations to leave to the backend; None means `winning_kernels`.

    Attributes
    ----------
    kernels : mapping of str to callable
        The kernels in use, by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        backend: Backend | None,
        kernels: Iterable[str] | None = None,
    ) -> None:
        self.kernels: Mapping[str, Callable[..., Any]] = {}
        self._least = 1
        if backend is None:
            return
        self._least = backend.min_dot
        names = set(winning_kernels(backend, dtype) if kernels is None else kernels)
        for field, needing in _TILED.items():
            size = getattr(config, field)
            if size & (size - 1) or size < self._least:
                names.difference_update(needing)
        self.kernels = {n: run for n, run in operations(backend).items() if n in names}

    @classmethod
    def on(cls, device: torch.device, config: ModelConfig, dtype: torch.dtype) -> Operations:
        """Return what is best on a device.

        Raises
        ------
        BackendError
            As of `servespec.fast.backends.registry.choose`.
        """
        return cls(config, dtype, choose(device))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm ``[T, n]`` by `servespec.fast.kernels.norms.rms_norm`, in the dtype of `x`."""
        kernel = self.kernels.get("rms_norm")
        if kernel is None:
            return norms.rms_norm(x, weight, eps).to(x.dtype)
        normed: Tensor = kernel(x, weight, eps, x.dtype)
        return normed

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm ``[T, heads, n]`` and gate it, in the dtype of `gate`."""
        kernel = self.kernels.get("gated_rms_norm")
        if kernel is None:
            return norms.gated_rms_norm(x, gate, weight, eps).to(gate.dtype)
        normed: Tensor = kernel(x, gate, weight, eps, gate.dtype)
        return normed

    def l2_norm(self, x: Tensor) -> Tensor:
        """Norm ``[T, heads, n]`` to length one, float32."""
        normed: Tensor = self.kernels.get("l2_norm", norms.l2_norm)(x)
        return normed

    def norm_rotary(self, x: Tensor, weight: Tensor, cos_sin: Tensor, eps: float) -> Tensor:
        """Norm every head of ``[T, heads, n]``, then rotate it, in the dtype of `x`."""
        kernel = self.kernels.get("norm_rotary")
        if kernel is None:
            return rotary.apply_rotary(norms.rms_norm(x, weight, eps), cos_sin).to(x.dtype)
        rotated: Tensor = kernel(x, weight, cos_sin, eps, x.dtype)
        return rotated

    def gating(
        self, a: Tensor, b: Tensor, negative_decay: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``g`` and ``beta``, ``[T, Hv]`` float32 and contiguous."""
        g, beta = self.kernels.get("gating", gated_delta_rule.gating)(a, b, negative_decay, dt_bias)
        return g, beta

    def write_kv(self, key: Tensor, value: Tensor, kv: PagedKV, step: AttentionStep) -> None:
        """Write each token's K and V ``[T, G, D]`` to its slot."""
        kernel = self.kernels.get("write_kv")
        if kernel is None:
            kv_cache.write_kv(key, value, kv, step.slots)
        else:
            kernel(key, value, kv.key, kv.value, step.slot_mapping)

    def attend(self, query: Tensor, kv: PagedKV, step: AttentionStep) -> Tensor:
        """Attend with ``[T, H, D]`` to the pages, which hold the step's own K and V."""
        count = step.num_decodes
        parts = []
        if step.decodes is not None:
            parts.append(self._attend_decodes(query[:count], kv, step.decodes))
        if step.prefills is not None:
            parts.append(self._attend_prefills(query[count:], kv, step.prefills))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _paged(self, name: str, kv: PagedKV) -> Callable[..., Any] | None:
        """Return a kernel that can take the blocks as they are."""
        tile = kv.kernel_block_size & -kv.kernel_block_size
        return self.kernels.get(name) if tile >= self._least else None

    def _attend_decodes(self, query: Tensor, kv: PagedKV, rows: AttentionRows) -> Tensor:
        kernel = self._paged("paged_attention_decode", kv)
        if kernel is None:
            return attention.varlen_attention(query, kv, rows.plan)
        attended: Tensor = kernel(
            *(query, kv.key, kv.value, rows.block_table, rows.seq_lens, query.shape[-1] ** -0.5),
            kernel_block_size=kv.kernel_block_size,
        )
        return attended

    def _attend_prefills(self, query: Tensor, kv: PagedKV, rows: AttentionRows) -> Tensor:
        kernel = self._paged("varlen_attention", kv)
        if kernel is None:
            return attention.varlen_attention(query, kv, rows.plan)
        attended: Tensor = kernel(
            *(query, kv.key, kv.value, rows.block_table, rows.query_start_loc, rows.seq_lens),
            *(rows.max_query_len, query.shape[-1] ** -0.5),
            kernel_block_size=kv.kernel_block_size,
        )
        return attended

    def convolve(self, x: Tensor, taps: Tensor, states: GdnStates, step: GdnStep) -> Tensor:
        """Convolve ``[T, C]`` raw inputs to float32 and move the windows on."""
        count = step.num_decodes
        parts = []
        if count:
            run = self.kernels.get("convolution_decode", convolution.convolution_decode)
            parts.append(run(x[:count], taps, states.conv, step.decode_slots))
        if step.prefill is not None:
            parts.append(self._convolve(x[count:], taps, states.conv, step.prefill))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _convolve(self, x: Tensor, taps: Tensor, states: Tensor, rows: GdnPrefill) -> Tensor:
        kernel = self.kernels.get("convolution_rows")
        if kernel is None:
            return convolution.convolution_prefill(x, taps, states, rows.slots, rows.convolution)
        out: Tensor = kernel(
            x, taps, states, rows.slots, rows.query_start_loc, rows.has_initial_state
        )
        return out

    def recur(self, tokens: DeltaRuleTokens, states: GdnStates, step: GdnStep) -> Tensor:
        """Apply the gated delta rule and move the states on; ``[T, Hv, dv]`` float32."""
        count = step.num_decodes
        parts = []
        if count:
            decodes = tokens.part(slice(count))
            kernel = self.kernels.get("gated_delta_rule_decode")
            parts.append(
                gated_delta_rule.gated_delta_rule_decode(
                    *decodes, states.ssm, step.decode_slots, step.decode_span
                )
                if kernel is None
                else kernel(*decodes, states.ssm, step.decode_slots)
            )
        if step.prefill is not None:
            rest = tokens.part(slice(count, None))
            parts.append(self._scan(rest, states.ssm, step.prefill))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _scan(self, tokens: DeltaRuleTokens, states: Tensor, rows: GdnPrefill) -> Tensor:
        starts = rows.query_start_loc
        kernel = self.kernels.get("chunk_gated_delta_rule")
        if kernel is not None:
            scanned: Tensor = kernel(*tokens, states, rows.slots, starts, rows.chunk_table)
            return scanned
        read: Tensor | None = None
        kernel = self.kernels.get("gated_delta_rule_rows")
        shortest = 0
        if kernel is not None:
            shortest = RECURRENT_TOKENS
            slots = rows.recurrent_slots(shortest)
            if slots is not None:
                read = kernel(*tokens, states, slots, starts, starts)
        plan = rows.chunks(shortest)
        if plan is None:
            assert read is not None
            return read
        return chunk_gated_delta_rule.chunk_gated_delta_rule(
            *tokens, states, rows.slots, plan, read
        )
