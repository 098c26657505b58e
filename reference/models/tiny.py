"""The embedded model: a tiny Qwen3.5 made from a seed, with nothing trivial in it.

A weight that is zero, one or small hides mistakes: a norm whose weight is applied plainly instead
of as ``1 + w``, a decay that never fades. So norms, decays, biases and taps are spread as widely
as in a trained model, key and value dimensions differ, heads are grouped in both kinds of layer,
and logits spread so that greedy choices are far apart for float32 and still depend on the whole
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import LayerType, ModelConfig, RopeConfig
from servespec.reference.models.parameters import parameter_shapes

__all__ = ["config", "weights"]

_PATTERN: tuple[LayerType, ...] = ("linear_attention",) * 3 + ("full_attention",)

_CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    layer_types=_PATTERN * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    rope=RopeConfig(rope_theta=10_000.0, partial_rotary_factor=0.25, mrope_section=(2, 1, 1)),
    max_position_embeddings=4096,
)


def config(**changes: Any) -> ModelConfig:
    """Sizes of the embedded model: eight layers, every fourth full attention.

    Parameters
    ----------
    **changes
        Fields of `ModelConfig` to replace, for example ``layer_types=("full_attention",) * 4`` for
        a dense model.

    Returns
    -------
    ModelConfig

    Raises
    ------
    ConfigError
        If the changed fields do not fit together.
    """
    return replace(_CONFIG, **changes)


def weights(config: ModelConfig, seed: int) -> Mapping[str, npt.NDArray[np.float32]]:
    """Random parameters of a model.

    Parameters
    ----------
    config : ModelConfig
    seed : int
        Of NumPy's PCG64; the same seed gives the same weights on every machine.

    Returns
    -------
    mapping of str to numpy.ndarray
        Every parameter of `parameter_shapes`, float32, read-only.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    made: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in parameter_shapes(config).items():
        normal = random.standard_normal(shape)
        made[name] = _spread(name, normal).astype(np.float32)
        made[name].flags.writeable = False
    return MappingProxyType(made)


def _spread(name: str, normal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shift and scale standard normal values to what the parameter needs.

    The numbers were chosen by measurement: a changed first token still changes the greedy output
    hundreds of tokens later (heads that attend sharply, some states that fade slowly, strong
    attention outputs), outputs do not settle into one token, and float32 stays four orders of
    magnitude below the spread of the logits.
    """
    kind = name.removesuffix(".weight").rpartition(".")[2]
    fan_in = 1.0 / math.sqrt(normal.shape[-1])  # unit variance in, unit variance out
    if name.endswith("linear_attn.norm.weight"):
        return 0.3 * normal + 1.0  # a plain weight, the others are differences from one
    if kind in ("q_norm", "k_norm"):
        return 0.3 * normal + 1.0
    if kind.endswith("norm"):
        return 0.3 * normal
    if kind == "A_log":
        return 1.5 * normal - 1.0
    if kind == "dt_bias":
        return normal - 3.0
    scale = {
        "embed_tokens": 1.0,
        "lm_head": 2.0 * fan_in,
        "conv1d": 0.5,
        "o_proj": 2.0 * fan_in,
        "out_proj": 0.5 * fan_in,
        "down_proj": 0.5 * fan_in,
    }
    return scale.get(kind, fan_in) * normal
