"""Names and shapes of the parameters of a dense Qwen3.5 text model.

Names are those of a Hugging Face checkpoint; a mapping of such names to float32 arrays is how
weights travel between the packages. Source: ``Qwen3_5ForCausalLM`` of
transformers' ``models/qwen3_5/modeling_qwen3_5.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import ConfigError, LayerType, ModelConfig

__all__ = ["check_weights", "layer_shapes", "parameter_shapes"]

Shape = tuple[int, ...]


def layer_shapes(config: ModelConfig, layer_type: LayerType) -> Mapping[str, Shape]:
    """Shapes of one decoder layer by name below ``model.layers.<i>.``.

    Parameters
    ----------
    config : ModelConfig
    layer_type : {"linear_attention", "full_attention"}

    Returns
    -------
    mapping of str to tuple of int
        Matrices are ``[outputs, inputs]``. The query projection of a full-attention layer holds
        ``[query, gate]`` for each head in turn.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    if layer_type == "full_attention":
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        shapes |= {
            "self_attn.q_proj.weight": (2 * queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    else:
        heads = config.linear_num_value_heads
        values = heads * config.linear_value_head_dim
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (config.conv_dim, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (config.conv_dim, 1, config.linear_conv_kernel_dim),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (config.linear_value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        }
    return MappingProxyType(
        shapes
        | {
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
    )


def parameter_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Shapes of all parameters by their checkpoint names.

    Parameters
    ----------
    config : ModelConfig

    Returns
    -------
    mapping of str to tuple of int
        In model order. With tied embeddings there is no ``lm_head.weight``.
    """
    embedding = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": embedding}
    for index, layer_type in enumerate(config.layer_types):
        for name, shape in layer_shapes(config, layer_type).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = embedding
    return MappingProxyType(shapes)


def check_weights(config: ModelConfig, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Require exactly the parameters of a model.

    Parameters
    ----------
    config : ModelConfig
    weights : mapping of str to numpy.ndarray

    Raises
    ------
    ConfigError
        If a parameter is missing, unknown or of the wrong shape.
    """
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        found = weights[name].shape if name in weights else None
        if found != shape:
            raise ConfigError(f"shape of weight {name!r}", found, f"{shape}")
    for name in weights:
        if name not in shapes:
            raise ConfigError("name of a weight", name, "a parameter of the model")
