"""``config.json`` of a Hugging Face checkpoint, to and from `ModelConfig`.

Source: ``Qwen3_5TextConfig`` of transformers' ``models/qwen3_5/configuration_qwen3_5.py``, whose
defaults apply to fields that a file leaves out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servespec.reference.contracts import CheckpointError, ConfigError, ModelConfig, RopeConfig
from servespec.reference.contracts.config import LayerType

__all__ = ["read_config", "to_json"]

_MAX_BYTES = 1 << 24
_MAX_LAYERS = 1024  # the largest Qwen3.5 has 64; a file without layer_types could claim any number
_MAX_SIZE = 1 << 24  # more than any real model's, and little enough to multiply
_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_FIXED = {"hidden_act": "silu", "attention_bias": False}
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


class _Fields:
    """Typed look-up in a JSON object; errors name the file, the field and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def error(self, name: str, value: object, allowed: str) -> CheckpointError:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        return CheckpointError(f"{self._path}: {name} is {shown}: must be {allowed}")

    def integer(self, name: str, default: int) -> int:
        value = self._values.get(name, default)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise self.error(name, value, f"an integer in [1, {_MAX_SIZE}]")
        return value

    def real(self, name: str, default: float) -> float:
        value = self._values.get(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or abs(value) > 1e300 or math.isnan(value):
            raise self.error(name, value, "a finite number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name) or []
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise self.error(name, value, "a list of integers")
        return tuple(value)

    def section(self, name: str) -> _Fields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return _Fields(self._path, value)

    def layer_types(self) -> tuple[LayerType, ...]:
        value = self._values.get("layer_types")
        if value is None:
            count = self.integer("num_hidden_layers", 32)
            interval = self.integer("full_attention_interval", 4)
            if count > _MAX_LAYERS:
                raise self.error("num_hidden_layers", count, f"in [1, {_MAX_LAYERS}]")
            return tuple(
                "linear_attention" if (index + 1) % interval else "full_attention"
                for index in range(count)
            )
        if not isinstance(value, list) or len(value) > _MAX_LAYERS:
            raise self.error("layer_types", value, f"a list of at most {_MAX_LAYERS} names")
        if self.integer("num_hidden_layers", len(value)) != len(value):
            raise self.error(
                "num_hidden_layers",
                self._values["num_hidden_layers"],
                f"{len(value)}, the length of layer_types",
            )
        return tuple(value)

    def check_supported(self) -> None:
        model_type = self._values.get("model_type")
        if model_type not in _MODEL_TYPES:
            raise self.error("model_type", model_type, f"one of {', '.join(_MODEL_TYPES)}")
        for name, only in _FIXED.items():
            value = self._values.get(name, only)
            if value != only:
                raise self.error(name, value, f"{only!r}, the only choice supported")

    def rope(self) -> RopeConfig:
        # transformers before 5 wrote rope_scaling, and theta and the factor beside it.
        section = self.section("rope_parameters") or self.section("rope_scaling")
        inner = section or _Fields(self._path, {})
        rope_type = inner._values.get("rope_type", inner._values.get("type", "default"))
        if rope_type not in ("default", "mrope"):
            raise self.error("rope_type", rope_type, "'default', the only choice supported")

        def real(name: str, default: float) -> float:
            return (inner if name in inner._values else self).real(name, default)

        return RopeConfig(
            rope_theta=real("rope_theta", 10_000.0),
            partial_rotary_factor=real("partial_rotary_factor", 0.25),
            mrope_section=inner.integers("mrope_section"),
        )


def read_config(path: Path) -> ModelConfig:
    """Read the text model's part of a ``config.json``.

    Parameters
    ----------
    path : pathlib.Path
        The file. A multimodal checkpoint nests the text model under ``text_config``.

    Returns
    -------
    ModelConfig

    Raises
    ------
    CheckpointError
        If the file is missing, is not JSON, or describes another kind of model.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: more than {_MAX_BYTES} bytes: not a model's config")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    outer = _Fields(path, values)
    outer.check_supported()
    text = outer.section("text_config")
    fields = text or outer
    if text is not None:
        text.check_supported()
    try:
        return ModelConfig(
            layer_types=fields.layer_types(),
            rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
            rope=fields.rope(),
            # A multimodal model ties by its own field, whatever the nested part says.
            tie_word_embeddings=outer.boolean(
                "tie_word_embeddings", fields.boolean("tie_word_embeddings", False)
            ),
            **{name: fields.integer(name, default) for name, default in _SIZES.items()},
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def to_json(config: ModelConfig, dtype: str) -> str:
    """``config.json`` for a model, as transformers reads it.

    Parameters
    ----------
    config : ModelConfig
    dtype : str
        Element type of the weights beside it.

    Returns
    -------
    str
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": config.rope.rope_theta,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
    }
    if config.rope.mrope_section:
        rope |= {"mrope_section": list(config.rope.mrope_section), "mrope_interleaved": True}
    values = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": dtype,
        **{name: getattr(config, name) for name in _SIZES},
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": list(config.layer_types),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        **_FIXED,
    }
    return json.dumps(values, indent=2) + "\n"
