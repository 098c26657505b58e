"""Qwen3.5, dense, text only: gated delta net layers with a full-attention layer in every few.

Each layer is ``x += mixer(norm(x)); x += mlp(norm(x))``, with norms that store ``weight - 1``.

Source: ``Qwen3_5ForCausalLM`` of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from servespec.fast.batch.inputs import StepInputs
from servespec.fast.cache.memory import CacheMemory
from servespec.fast.kernels.linear import Linear
from servespec.fast.kernels.rotary import cos_sin_table
from servespec.fast.models.layers import MLP, Attention, GatedDeltaNet, Parameters, Weights
from servespec.fast.models.operations import Operations
from servespec.fast.models.parameters import check_parameters
from servespec.fast.models.plan import StepPlan, plan_step
from servespec.reference.contracts import ModelConfig

__all__ = ["Qwen3_5"]


class _Layer:
    def __init__(
        self, config: ModelConfig, parameters: Parameters, index: int, operations: Operations
    ) -> None:
        self._operations = operations
        self._eps = config.rms_norm_eps
        self._mixer = (
            Attention(config, parameters.below("self_attn."), index, operations)
            if config.layer_types[index] == "full_attention"
            else GatedDeltaNet(config, parameters.below("linear_attn."), index, operations)
        )
        self._mlp = MLP(parameters.below("mlp."))
        self._mixer_norm = 1.0 + parameters.float32("input_layernorm.weight")
        self._mlp_norm = 1.0 + parameters.float32("post_attention_layernorm.weight")

    def forward(self, x: Tensor, plan: StepPlan) -> Tensor:
        normed = self._operations.rms_norm(x, self._mixer_norm, self._eps)
        x = x + self._mixer.forward(normed, plan)
        normed = self._operations.rms_norm(x, self._mlp_norm, self._eps)
        return x + self._mlp.forward(normed)


class Qwen3_5:  # noqa: N801 - the name of the architecture
    """The model, ready to run.

    Parameters
    ----------
    config : ModelConfig
    weights : mapping of str to numpy.ndarray or Tensor
        By Hugging Face names; read, never changed.
    dtype : torch.dtype
        Of activations, weights and K/V: float32 or bfloat16.
    device : torch.device or str
    max_model_len : int or None
        Positions that may occur; None means `ModelConfig.max_position_embeddings`.
    operations : Operations or None
        How the layers compute; None means what is best on the device.

    Attributes
    ----------
    config : ModelConfig
    dtype : torch.dtype
    device : torch.device
    operations : Operations

    Raises
    ------
    ConfigError
        A parameter is missing or has another shape than the configuration gives it.
    BackendError
        ``SERVESPEC_BACKEND`` asks for what cannot run here, or both Tritons are installed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_model_len: int | None = None,
        operations: Operations | None = None,
    ) -> None:
        check_parameters(config, weights)
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.operations = operations or Operations.on(self.device, config, dtype)
        parameters = Parameters(weights, dtype, self.device)
        self._embedding = parameters.get("model.embed_tokens.weight")
        self._layers = [
            _Layer(config, parameters.below(f"model.layers.{index}."), index, self.operations)
            for index in range(config.num_hidden_layers)
        ]
        self._norm = 1.0 + parameters.float32("model.norm.weight")
        tied = config.tie_word_embeddings
        self._head = Linear(self._embedding if tied else parameters.get("lm_head.weight"))
        self._cos_sin = cos_sin_table(
            max_model_len or config.max_position_embeddings,
            config.rotary_dim,
            config.rope.rope_theta,
            self.device,
        )

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, memory: CacheMemory) -> Tensor:
        """Run one step.

        Parameters
        ----------
        inputs : StepInputs
            Of at least one token, without drafts.
        memory : CacheMemory
            K/V and states, changed in place.

        Returns
        -------
        Tensor
            ``[len(logits_indices), vocab_size]`` float32.
        """
        plan = plan_step(inputs, memory, self._cos_sin)
        x = functional.embedding(inputs.token_ids, self._embedding)
        for layer in self._layers:
            x = layer.forward(x, plan)
        last = x.index_select(0, inputs.logits_indices)
        normed = self.operations.rms_norm(last, self._norm, self.config.rms_norm_eps)
        return self._head(normed).float()
