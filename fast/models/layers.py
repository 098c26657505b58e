"""The three blocks of a Qwen3.5 layer: full attention, gated delta net and MLP.

Projections that read the same input are merged when the weights are loaded. Norms, rotary,
convolution and recurrence are float32, everything else is in the model dtype.

Source: ``Qwen3_5Attention``, ``Qwen3_5GatedDeltaNet`` and ``Qwen3_5MLP`` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servespec.fast.cache.memory import GdnStates
from servespec.fast.kernels.activations import sigmoid_gate, silu_and_mul
from servespec.fast.kernels.attention import varlen_attention
from servespec.fast.kernels.chunk_gated_delta_rule import chunk_gated_delta_rule
from servespec.fast.kernels.convolution import convolution_decode, convolution_prefill
from servespec.fast.kernels.gated_delta_rule import gated_delta_rule_decode, gating
from servespec.fast.kernels.kv_cache import write_kv
from servespec.fast.kernels.linear import Linear
from servespec.fast.kernels.norms import gated_rms_norm, l2_norm, rms_norm
from servespec.fast.kernels.rotary import apply_rotary
from servespec.fast.models.plan import GdnStep, StepPlan
from servespec.reference.contracts import ModelConfig

__all__ = ["MLP", "Attention", "GatedDeltaNet", "Parameters", "Weights"]

Weights = Mapping[str, Tensor] | Mapping[str, npt.NDArray[np.float32]]
"""Parameters by their Hugging Face names."""


class Parameters:
    """Weights on their way to a device and dtype, by their names below a prefix."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, prefix: str = ""
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._prefix = prefix

    def below(self, prefix: str) -> Parameters:
        """Return the parameters whose names go on with a prefix."""
        return Parameters(self._weights, self._dtype, self._device, self._prefix + prefix)

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one parameter in the model dtype, or another."""
        stored = self._weights[self._prefix + name]
        # A copy, because arrays may be read-only, which torch cannot express.
        tensor = stored if isinstance(stored, Tensor) else torch.from_numpy(np.array(stored))
        return tensor.to(device=self._device, dtype=dtype or self._dtype).contiguous()

    def float32(self, name: str) -> Tensor:
        """Return one parameter in float32."""
        return self.get(name, torch.float32)

    def merged(self, *names: str) -> Tensor:
        """Return parameters one below the other."""
        return torch.cat([self.get(name) for name in names])


def _heads(x: Tensor, dim: int) -> Tensor:
    """``[T, heads * dim]`` to ``[T, heads, dim]``."""
    return torch.unflatten(x, 1, (-1, dim))


class MLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, parameters: Parameters) -> None:
        self._gate_up = Linear(parameters.merged("gate_proj.weight", "up_proj.weight"))
        self._down = Linear(parameters.get("down_proj.weight"))

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        return self._down(silu_and_mul(self._gate_up(x)))


class Attention:
    """Grouped-query attention with normed, partly rotated heads and a sigmoid output gate."""

    def __init__(self, config: ModelConfig, parameters: Parameters, layer: int) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layer = layer
        self._heads = heads
        self._dim = config.head_dim
        self._widths = [(heads + kv_heads) * self._dim, kv_heads * self._dim, heads * self._dim]
        self._eps = config.rms_norm_eps
        # In the checkpoint each head's query is followed by its gate.
        query_gate = parameters.get("q_proj.weight").view(heads, 2, self._dim, -1)
        # Queries and keys lie side by side here, to share one norm and one rotation.
        self._in_proj = Linear(
            torch.cat(
                (
                    query_gate[:, 0].flatten(0, 1),
                    parameters.merged("k_proj.weight", "v_proj.weight"),
                    query_gate[:, 1].flatten(0, 1),
                )
            )
        )
        self._norm = 1.0 + torch.cat(
            (
                parameters.float32("q_norm.weight").expand(heads, -1),
                parameters.float32("k_norm.weight").expand(kv_heads, -1),
            )
        )
        self._out_proj = Linear(parameters.get("o_proj.weight"))

    def forward(self, x: Tensor, plan: StepPlan) -> Tensor:
        """``[T, hidden]`` to ``[T, hidden]``; writes K and V first."""
        kv, step = plan.memory.kv(self._layer), plan.attention[self._layer]
        query_key, value, gate = torch.split(self._in_proj(x), self._widths, dim=-1)
        normed = rms_norm(_heads(query_key, self._dim), self._norm, self._eps)
        query_key = apply_rotary(normed, plan.cos_sin).to(x.dtype)
        write_kv(query_key[:, self._heads :], _heads(value, self._dim), kv, step.slots)
        attended = varlen_attention(query_key[:, : self._heads], kv, step.attention)
        return self._out_proj(sigmoid_gate(attended.flatten(1), gate))


class GatedDeltaNet:
    """Causal convolution, gated delta rule, gated norm."""

    def __init__(self, config: ModelConfig, parameters: Parameters, layer: int) -> None:
        heads = config.linear_num_value_heads
        self._layer = layer
        self._key_dim, self._value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self._values = heads * self._value_dim
        self._widths = [config.conv_dim, self._values, heads, heads]
        self._eps = config.rms_norm_eps
        self._in_proj = Linear(
            parameters.merged(*(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))
        )
        self._taps = parameters.float32("conv1d.weight").squeeze(1).t().contiguous()
        self._negative_decay = -parameters.float32("A_log").exp()
        self._dt_bias = parameters.float32("dt_bias")
        self._norm = parameters.float32("norm.weight")
        self._out_proj = Linear(parameters.get("out_proj.weight"))

    def forward(self, x: Tensor, plan: StepPlan) -> Tensor:
        """``[T, hidden]`` to ``[T, hidden]``; moves the states on."""
        states, step = plan.memory.gdn(self._layer), plan.gdn[self._layer]
        mixed, z, b, a = torch.split(self._in_proj(x), self._widths, dim=-1)
        qkv = self._convolve(mixed, states, step)
        v = _heads(qkv[:, -self._values :], self._value_dim)
        q_k = l2_norm(torch.unflatten(qkv[:, : -self._values], 1, (2, -1, self._key_dim)))
        q, k = q_k[:, 0].mul_(self._key_dim**-0.5), q_k[:, 1]
        g, beta = gating(a, b, self._negative_decay, self._dt_bias)
        read = self._recur((q, k, v, g, beta), states, step)
        gate = _heads(z, self._value_dim)
        normed = gated_rms_norm(read, gate, self._norm, self._eps).flatten(1)
        return self._out_proj(normed.to(x.dtype))

    def _convolve(self, x: Tensor, states: GdnStates, step: GdnStep) -> Tensor:
        count = step.num_decodes
        parts = []
        if count:
            parts.append(convolution_decode(x[:count], self._taps, states.conv, step.decode_slots))
        if step.convolution is not None:
            parts.append(
                convolution_prefill(
                    x[count:], self._taps, states.conv, step.prefill_slots, step.convolution
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _recur(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        states: GdnStates,
        step: GdnStep,
    ) -> Tensor:
        count = step.num_decodes
        parts = []
        if count:
            q, k, v, g, beta = (x[:count] for x in tensors)
            parts.append(
                gated_delta_rule_decode(
                    q, k, v, g, beta, states.ssm, step.decode_slots, step.decode_span
                )
            )
        if step.chunks is not None:
            q, k, v, g, beta = (x[count:] for x in tensors)
            parts.append(
                chunk_gated_delta_rule(
                    q, k, v, g, beta, states.ssm, step.prefill_slots, step.chunks
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
