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

from servespec.fast.kernels.activations import sigmoid_gate, silu_and_mul
from servespec.fast.kernels.linear import Linear
from servespec.fast.models.operations import DeltaRuleTokens, Operations
from servespec.fast.models.plan import StepPlan
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

    def __init__(
        self, config: ModelConfig, parameters: Parameters, layer: int, operations: Operations
    ) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._operations = operations
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
        query_key = self._operations.norm_rotary(
            _heads(query_key, self._dim), self._norm, plan.cos_sin, self._eps
        )
        key = query_key[:, self._heads :]
        self._operations.write_kv(key, _heads(value, self._dim), kv, step)
        attended = self._operations.attend(query_key[:, : self._heads], kv, step)
        return self._out_proj(sigmoid_gate(attended.flatten(1), gate))


class GatedDeltaNet:
    """Causal convolution, gated delta rule, gated norm."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, layer: int, operations: Operations
    ) -> None:
        heads = config.linear_num_value_heads
        self._operations = operations
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
        run = self._operations
        qkv = run.convolve(mixed, self._taps, states, step)
        v = _heads(qkv[:, -self._values :], self._value_dim)
        q_k = run.l2_norm(_heads(qkv[:, : -self._values], self._key_dim))
        q, k = q_k.tensor_split(2, dim=1)
        g, beta = run.gating(a, b, self._negative_decay, self._dt_bias)
        q.mul_(self._key_dim**-0.5)
        read = run.recur(DeltaRuleTokens(q, k, v, g, beta), states, step)
        gated = run.gated_rms_norm(read, _heads(z, self._value_dim), self._norm, self._eps)
        return self._out_proj(gated.flatten(1))
