"""Names and shapes of a Qwen3.5 text model's parameters, as its checkpoint spells them.

Source: ``Qwen3_5ForCausalLM`` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from servespec.reference.contracts import ConfigError, ModelConfig, require

__all__ = ["Shape", "check_parameters", "parameter_shapes"]

Shape = tuple[int, ...]


class _HasShape(Protocol):
    @property
    def shape(self) -> Shape: ...


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return every parameter's shape by its Hugging Face name.

    With tied embeddings there is no ``lm_head.weight``.
    """
    h, f, v = model.hidden_size, model.intermediate_size, model.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (v, h)}
    for index, layer_type in enumerate(model.layer_types):
        mixer = _attention(model) if layer_type == "full_attention" else _gdn(model)
        shapes |= {
            f"model.layers.{index}.{name}": shape
            for name, shape in (
                ("input_layernorm.weight", (h,)),
                *mixer.items(),
                ("post_attention_layernorm.weight", (h,)),
                ("mlp.gate_proj.weight", (f, h)),
                ("mlp.up_proj.weight", (f, h)),
                ("mlp.down_proj.weight", (h, f)),
            )
        }
    shapes["model.norm.weight"] = (h,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, h)
    return shapes


def _attention(model: ModelConfig) -> dict[str, Shape]:
    h, dim = model.hidden_size, model.head_dim
    query, key = model.num_attention_heads * dim, model.num_key_value_heads * dim
    return {
        # Each head's query is followed by its output gate.
        "self_attn.q_proj.weight": (2 * query, h),
        "self_attn.k_proj.weight": (key, h),
        "self_attn.v_proj.weight": (key, h),
        "self_attn.o_proj.weight": (h, query),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _gdn(model: ModelConfig) -> dict[str, Shape]:
    h, heads = model.hidden_size, model.linear_num_value_heads
    values = heads * model.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkv.weight": (model.conv_dim, h),
        "linear_attn.in_proj_z.weight": (values, h),
        "linear_attn.in_proj_b.weight": (heads, h),
        "linear_attn.in_proj_a.weight": (heads, h),
        "linear_attn.conv1d.weight": (model.conv_dim, 1, model.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (model.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (h, values),
    }


def check_parameters(model: ModelConfig, weights: Mapping[str, _HasShape]) -> None:
    """Raise unless every parameter is there in its shape.

    Raises
    ------
    ConfigError
        Naming the parameter, what was given and what the model needs.
    """
    for name, shape in parameter_shapes(model).items():
        if name not in weights:
            raise ConfigError(f"weights[{name!r}]", None, f"there, of shape {shape}")
        given = tuple(weights[name].shape)
        require(given == shape, f"shape of weights[{name!r}]", given, f"{shape}")
