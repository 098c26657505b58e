"""From a Hugging Face ``config.json`` to `ModelConfig`.

Source: ``Qwen3_5TextConfig`` of transformers, whose defaults stand where a key is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from servespec.reference.contracts import (
    ConfigError,
    LayerType,
    ModelConfig,
    RopeConfig,
    require,
)

__all__ = ["model_config"]

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_SIZES = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
}
# Larger sizes than any real model's would only serve to exhaust memory.
_MAX_SIZE = 1 << 24
_MAX_NUMBER = 1e30


def model_config(document: Mapping[str, Any], max_layers: int) -> ModelConfig:
    """Read the text model's configuration.

    Parameters
    ----------
    document : mapping
        The file's object; a multimodal one nests the text model under ``text_config``.
    max_layers : int
        More layers than this are refused before anything is made of them.

    Returns
    -------
    ModelConfig

    Raises
    ------
    ConfigError
        A value is missing, of the wrong kind, out of range or of a feature that is not supported.
    """
    text = document.get("text_config")
    if text is None:
        text = document
    if not isinstance(text, dict):
        raise ConfigError("text_config", text, "an object")
    kind = text.get("model_type", document.get("model_type"))
    require(kind in _MODEL_TYPES, "model_type", kind, f"one of {', '.join(_MODEL_TYPES)}")
    for key, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("attn_output_gate", True),
    ):
        require(text.get(key, only) == only, key, text.get(key), repr(only))
    tied = document.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    require(isinstance(tied, bool), "tie_word_embeddings", tied, "true or false")
    return ModelConfig(
        **{key: _integer(text, key, default) for key, default in _SIZES.items()},
        layer_types=_layer_types(text, max_layers),
        rms_norm_eps=_number(text, "rms_norm_eps", 1e-6),
        rope=_rope(text),
        tie_word_embeddings=tied,
    )


def _integer(source: Mapping[str, Any], key: str, default: int) -> int:
    value = source.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        raise ConfigError(key, value, f"an integer in [1, {_MAX_SIZE}]")
    return value


def _number(source: Mapping[str, Any], key: str, default: float) -> float:
    value = source.get(key, default)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) < _MAX_NUMBER
    ):
        raise ConfigError(key, value, "a finite number")
    return float(value)


def _layer_types(text: Mapping[str, Any], max_layers: int) -> tuple[LayerType, ...]:
    given = text.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or not all(isinstance(kind, str) for kind in given):
            raise ConfigError("layer_types", given, "a list of names")
        _check_count("len(layer_types)", len(given), max_layers)
        count = text.get("num_hidden_layers", len(given))
        require(
            type(count) is int and count == len(given),
            "num_hidden_layers",
            count,
            f"{len(given)}, the length of layer_types",
        )
        return cast(tuple[LayerType, ...], tuple(given))
    count = _integer(text, "num_hidden_layers", 32)
    _check_count("num_hidden_layers", count, max_layers)
    interval = _integer(text, "full_attention_interval", 4)
    return tuple(
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)
    )


def _check_count(name: str, count: int, most: int) -> None:
    require(count <= most, name, count, f"at most {most}, the parameters in the files")


def _rope(text: Mapping[str, Any]) -> RopeConfig:
    # transformers before 5 wrote rope_scaling, and theta and the factor beside it.
    key = "rope_scaling" if text.get("rope_parameters") is None else "rope_parameters"
    given = text.get(key)
    rope = {} if given is None else given
    if not isinstance(rope, dict):
        raise ConfigError(key, rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind in ("default", "mrope"), "rope_parameters.rope_type", kind, "'default'")
    section = rope.get("mrope_section") or []
    if not isinstance(section, list) or not all(type(part) is int for part in section):
        raise ConfigError("rope_parameters.mrope_section", section, "a list of integers")
    outer = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}
    merged = {**outer, **rope}
    return RopeConfig(
        rope_theta=_number(merged, "rope_theta", 10_000.0),
        partial_rotary_factor=_number(merged, "partial_rotary_factor", 0.25),
        mrope_section=tuple(section),
    )
